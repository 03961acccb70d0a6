"""``tune checkpoint``."""

import argparse
import sys
from pathlib import Path

from torchtune._cli.subcommand import Subcommand


class Verify(Subcommand):
    """Subcommand that compares files with their checksums."""

    name = "checkpoint verify"
    help = "Compare every file with its checksum"
    description = (
        "Read every file of a checkpoint, and compare its size and checksum with the saved ones. For\n"
        "the folder of a run, read all its checkpoints. The exit code is 0 if all are intact, else 2."
    )
    epilog = """
        examples:
          $ tune checkpoint verify /tmp/run/epoch_0
          /tmp/run/epoch_0 is whole: 11 files, 538,090,408 bytes.
          $ tune checkpoint verify /tmp/run
    """

    def _add_arguments(self) -> None:
        self._parser.add_argument("folder", type=Path, help="a checkpoint, or the output_dir of a run")

    def _run(self, args: argparse.Namespace) -> None:
        from tqdm import tqdm

        from torchtune.checkpoints import CheckpointError, checkpoints_in, verify_checkpoint
        from torchtune.utils import UserError

        checkpoints = checkpoints_in(args.folder)
        num_damaged = 0
        for folder in checkpoints:
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            bar = tqdm(total=size, desc=folder.name, unit="B", unit_scale=True, leave=False, disable=None)
            try:
                with bar:
                    count, total = verify_checkpoint(folder, bar.update)
            except CheckpointError as error:
                num_damaged += 1
                print(f"error: {error}", file=sys.stderr)
                continue
            print(f"{folder} is whole: {count:,} files, {total:,} bytes.")
        if num_damaged:
            raise UserError(
                f"{num_damaged} of {len(checkpoints)} checkpoints of {args.folder} are damaged: use another one."
            )


class Checkpoint(Subcommand):
    """Subcommand that verifies saved checkpoints."""

    name = "checkpoint"
    help = "Verify saved checkpoints"
    description = "Verify checkpoints that recipes have saved."

    def _add_arguments(self) -> None:
        Verify(self._parser.add_subparsers(title="subcommands"))
