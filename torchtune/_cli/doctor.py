"""``tune doctor``."""

import argparse
import sys
from pathlib import Path

from torchtune._cli.subcommand import Subcommand


class Doctor(Subcommand):
    """Subcommand that reports devices, packages and disks of this machine, and reasons for slow runs."""

    name = "doctor"
    help = "Check devices, packages, disks and the hub, and name what will be slow"
    description = (
        "Check this machine: devices, memory, disks, packages and access to the hub. Nothing is\n"
        "downloaded. The exit code is 0 if training can run, else 1."
    )
    epilog = """
        examples:
          $ tune doctor
          $ tune doctor --output /shared/runs
    """

    def _add_arguments(self) -> None:
        self._parser.add_argument("--output", type=Path, default=Path("/tmp"), help="folder for runs (/tmp)")

    def _run(self, args: argparse.Namespace) -> None:
        from torchtune._cli._machine import examine
        from torchtune.config import redact_secrets

        findings = examine(args.output.expanduser())
        for name, texts in (
            *findings.facts,
            ("slow", findings.slow or ["nothing was found"]),
            ("problems", findings.problems or ["none: training can run"]),
        ):
            for number, text in enumerate(texts):
                print(f"{name if number == 0 else '':<12}{redact_secrets(text)}")
        sys.stdout.flush()
        if findings.problems:
            sys.exit(1)
