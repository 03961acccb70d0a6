"""Base class of the subcommands of ``tune``, and arguments that several of them have."""

import argparse
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

from torchtune.utils import UserError

# Help of an argument for :func:`find_checkpoint`.
CHECKPOINT = "folder of a checkpoint, or of a run (its best or last checkpoint), or a repository on the hub"


class Subcommand:
    """A subcommand, which adds its parser to ``subparsers`` and sets the parser's default ``func``.

    ``_run`` imports heavy modules itself, so that ``tune --help`` stays fast.

    Attributes:
        name: words of the subcommand after ``tune``.
        help: one line for ``tune --help``.
        description: help text before the options.
        epilog: help text after the options, mostly examples; it is dedented.
        usage: usage line, instead of argparse's.
        takes_tokens: whether all arguments are tokens, for :func:`parse_command`.
    """

    name: str
    help: str
    description: str
    epilog: str = ""
    usage: str | None = None
    takes_tokens = False

    def __init__(self, subparsers: argparse._SubParsersAction) -> None:
        options: dict[str, Any] = {}
        if self.takes_tokens:  # argparse must not take any argument for an option
            options = {"prefix_chars": "\0", "add_help": False}
        self._parser = subparsers.add_parser(
            self.name.rpartition(" ")[2],
            prog=f"tune {self.name}",
            usage=self.usage,
            help=self.help,
            description=self.description,
            epilog=dedent(self.epilog).strip(),
            formatter_class=argparse.RawTextHelpFormatter,
            **options,
        )
        self._add_arguments()
        self._parser.set_defaults(func=self._run, parser=self._parser)

    def _add_arguments(self) -> None:
        """Add this subcommand's arguments to its parser."""
        if self.takes_tokens:
            self._parser.add_argument("tokens", nargs="*", help=argparse.SUPPRESS)

    def _run(self, args: argparse.Namespace) -> None:
        """Run the subcommand; a group of subcommands prints its help."""
        self._parser.print_help()


def add_placement(parser: argparse.ArgumentParser) -> None:
    """Add the options ``--device``, ``--dtype`` and ``--nproc-per-node`` of a model that is loaded."""
    parser.add_argument("--device", help="cuda, cpu, mps … (default: the best one)")
    parser.add_argument(
        "--dtype", choices=["bf16", "fp32"], help="dtype of weights and activations (default: the checkpoint's)"
    )
    parser.add_argument(
        "--nproc-per-node",
        metavar="N",
        help="processes that share the model, one per device; gpu: one on every GPU (default: 1)",
    )


def find_checkpoint(model: str) -> str:
    """Return the best or last checkpoint if ``model`` is the output folder of a run; otherwise return ``model``.

    Raises:
        UserError: there is no such folder, or the run has no complete checkpoint.
    """
    from torchtune.reports import SETTINGS, RunFolder

    folder = Path(model).expanduser()
    if not folder.exists() and folder.is_absolute():  # otherwise it may be a repository on the hub
        raise UserError(f"{folder}: there is no such folder: give the folder of a model, a checkpoint or a run.")
    # A checkpoint has the settings of its run as well, and the config of its model, which a run's folder lacks.
    is_run = (folder / SETTINGS).is_file() and not any(folder.glob("*config.json"))
    if not is_run:
        return model
    checkpoint, description = RunFolder(folder).checkpoint()
    print(f"model       {checkpoint}, {description}", file=sys.stderr)
    return str(checkpoint)


def shared_by_processes(shards: str) -> str | None:
    """Return ``shards`` of :func:`torchtune.load` if this command runs in several processes, otherwise None."""
    from torchtune.training import is_distributed

    if not is_distributed():
        return None
    return shards


def check_least(args: argparse.Namespace, **least: float) -> None:
    """Raise ``UserError`` if an argument is NaN or less than its minimum; arguments that are None are skipped."""
    for name, smallest in least.items():
        value = getattr(args, name)
        if value is not None and not value >= smallest:
            raise UserError(f"--{name.replace('_', '-')} is {value}: it must be at least {smallest}.")


def check_most(args: argparse.Namespace, **most: float) -> None:
    """Raise ``UserError`` if an argument is greater than its maximum; arguments that are None are skipped."""
    for name, largest in most.items():
        value = getattr(args, name)
        if value is not None and value > largest:
            raise UserError(f"--{name.replace('_', '-')} is {value}: it must be at most {largest}.")
