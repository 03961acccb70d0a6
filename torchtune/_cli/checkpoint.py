"""``tune checkpoint``."""

import argparse
import textwrap
from pathlib import Path

from torchtune._cli.subcommand import Subcommand


class Checkpoint(Subcommand):
    """Subcommand that verifies saved checkpoints."""

    def __init__(self, subparsers: argparse._SubParsersAction) -> None:
        parser = subparsers.add_parser(
            "checkpoint",
            prog="tune checkpoint",
            help="Verify saved checkpoints",
            description="Verify checkpoints that recipes have saved.",
        )
        parser.set_defaults(func=lambda args: parser.print_help())
        self._parser = parser.add_subparsers(title="subcommands").add_parser(
            "verify",
            prog="tune checkpoint verify",
            help="Compare every file with its checksum",
            description="Read every file of a checkpoint, and compare its size and checksum with the saved ones. For\n"
            "the folder of a run, read all its checkpoints. The exit code is 0 if all are intact, else 2.",
            formatter_class=argparse.RawTextHelpFormatter,
            epilog=textwrap.dedent("""\
                examples:
                  $ tune checkpoint verify /tmp/run/epoch_0
                  /tmp/run/epoch_0 is whole: 11 files, 538,090,408 bytes.
                  $ tune checkpoint verify /tmp/run
                """),
        )
        self._add_arguments()
        self._parser.set_defaults(func=self._verify_cmd)

    def _add_arguments(self) -> None:
        self._parser.add_argument("folder", type=Path, help="a checkpoint, or the output_dir of a run")

    def _verify_cmd(self, args: argparse.Namespace) -> None:
        import sys

        from tqdm import tqdm

        from torchtune.checkpoints import CheckpointError, checkpoints_in, verify_checkpoint
        from torchtune.utils import UserError

        damaged, found = 0, checkpoints_in(args.folder)
        for folder in found:
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            bar = tqdm(total=size, desc=folder.name, unit="B", unit_scale=True, leave=False, disable=None)
            try:
                with bar:
                    count, total = verify_checkpoint(folder, bar.update)
            except CheckpointError as error:
                damaged += 1
                print(f"error: {error}", file=sys.stderr)
                continue
            print(f"{folder} is whole: {count:,} files, {total:,} bytes.")
        if damaged:
            raise UserError(f"{damaged} of {len(found)} checkpoints of {args.folder} are damaged: use another one.")
