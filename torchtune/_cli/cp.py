"""``tune cp``."""

import argparse
import itertools
import os
import re
import shutil
from pathlib import Path

from torchtune._cli._find_recipe import suggest_configs
from torchtune._cli.subcommand import Subcommand
from torchtune._recipe_registry import find_config, find_recipe
from torchtune.utils import atomic_write

_EXTENSION = re.compile(r"\.[A-Za-z]{1,4}")  # does not match the ".6B_lora" of "0.6B_lora"


def destination_of(source: Path, destination: str) -> Path:
    """Return the path for a copy of ``source``: inside a directory, or a file with the same suffix."""
    path = Path(destination)
    if path.is_dir() or destination.endswith(("/", os.sep)):
        return path / source.name
    if path.suffix == source.suffix or (source.suffix == ".yaml" and path.suffix == ".yml"):
        return path
    stem = path.stem if _EXTENSION.fullmatch(path.suffix) else path.name
    return path.with_name(stem + source.suffix)


def back_up(path: Path, content: bytes) -> Path | None:
    """Copy ``path`` to ``<name>.bak`` (or ``.bak1``, …) unless it equals ``content``.

    Returns the backup, or ``None`` if there is nothing to back up.
    """
    if not path.is_file() or (old := path.read_bytes()) == content:
        return None
    names = (f"{path.name}.bak{number or ''}" for number in itertools.count())
    for backup in map(path.with_name, names):
        if backup.is_file() and backup.read_bytes() == old:
            return backup
        if not os.path.lexists(backup):
            with atomic_write(backup, private=True) as file:
                file.write(old)
            shutil.copystat(path, backup)
            return backup
    raise AssertionError  # the counter is infinite


class Copy(Subcommand):
    """Subcommand that copies a recipe or a config for editing."""

    name = "cp"
    usage = "tune cp <recipe|config> destination [OPTIONS]"
    help = "Copy a recipe or config to change it"
    description = (
        "Copy a recipe or config to a file or into a directory, to change it.\n"
        "An existing file with other content is kept as <name>.bak."
    )
    epilog = """
        examples:
          $ tune cp lora_finetune_single_device my_recipe.py
          Copied file to my_recipe.py

          $ tune cp llama3_2/1B_lora_single_device configs/ --make-parents
          Copied file to configs/1B_lora_single_device.yaml
        To see what can be copied, run `tune ls`.
    """

    def _add_arguments(self) -> None:
        self._parser.add_argument("file", help="name of a recipe or config, as `tune ls` shows it")
        self._parser.add_argument("destination", help="file or directory to copy it to")
        self._parser.add_argument("-n", "--no-clobber", action="store_true", help="never overwrite a file")
        self._parser.add_argument("--make-parents", action="store_true", help="create missing directories")

    def _run(self, args: argparse.Namespace) -> None:
        source = find_recipe(args.file) or find_config(args.file)
        if source is None:
            hint = f": {suggest_configs(args.file)}".rstrip(": ") or "."
            self._parser.error(
                f"Invalid file name: {args.file}. Try `tune ls` to see all available files to copy{hint}"
            )
        destination = destination_of(source, args.destination)
        if args.no_clobber and destination.exists():
            print(f"File already exists at {destination.absolute()}, not overwriting.")
            return
        if not destination.parent.is_dir() and not args.make_parents:
            self._parser.error(
                f"Cannot create regular file: '{destination}'. No such file or directory. "
                "To create the directory, add --make-parents."
            )
        content = source.read_bytes()
        backup = back_up(destination, content)
        with atomic_write(destination) as file:
            file.write(content)
        print(f"Copied file to {destination}")
        if backup is not None:
            print(f"The previous file is kept as {backup}")
