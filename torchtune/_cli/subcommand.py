"""What subcommands of ``tune`` share: their base class, options, and the command line of ``tune run``.

``tune estimate``, ``tune sweep`` and ``tune selfcheck`` take the same words as ``tune run``.
"""

import argparse
import itertools
import math
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

from torchtune.utils import GRACE_VARIABLE, UserError

USAGE = (
    "tune run [TORCHRUN-OPTIONS] [<recipe>] --config <config> [--dry-run] [--simulate 8xH100] "
    "[--grace SECONDS] "
    "[key=value ...] [~key ...]"
)
# Default of --shutdown-timeout: seconds between SIGTERM and SIGKILL, for workers to save. It also delays a restart if
# workers hang in a collective with a dead rank.
SHUTDOWN_TIMEOUT = 120
# Options of torchrun that conflict with the recipe argument.
_CONFLICTING_OPTIONS = {"module": "--module", "no_python": "--no-python"}
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


@dataclass
class Command:
    """A parsed ``tune run`` command line."""

    torchrun: list[str]
    recipe: str | None
    config: str | None
    overrides: list[str]
    dry_run: bool = False
    simulate: str | None = None
    fit: str | None = None
    grace: float | None = None
    help: bool = False


def parse_command(tokens: list[str]) -> Command:
    """Parse a command line.

    Raises:
        UserError: an option is unknown, misplaced or lacks its value.
    """
    command = Command([], None, None, [])
    other_tokens = _take_own_options(command, tokens)
    for token in other_tokens:
        if token.startswith("-") and not _is_option(token):
            raise UserError(f"{token}: unknown option: settings are key=value, without dashes.")
    # The order of the others: torchrun's options, the recipe, overrides.
    num_options = 0
    if other_tokens and other_tokens[0].startswith("-"):
        # torchrun takes the first word that is no option or value for its script, and leaves all after it.
        parsed = _torchrun_parser(USAGE).parse_args([*other_tokens, "<end>"])
        for name, option in _CONFLICTING_OPTIONS.items():
            if getattr(parsed, name, False):
                raise UserError(f"{option}: `tune run` takes the name or path of a recipe: remove the option.")
        num_options = len(other_tokens) - len(parsed.training_script_args)
    command.torchrun = other_tokens[:num_options]
    overrides = other_tokens[num_options:]
    if overrides and not _is_override(overrides[0]):
        command.recipe = overrides.pop(0)
    for token, value in itertools.zip_longest(overrides, overrides[1:], fillvalue=""):
        if token.startswith("-"):
            if "=" not in token and not value.startswith("-") and not _is_override(value):
                token = f"{token} {value}".rstrip()  # the option with its value, as it is to be moved
            raise UserError(
                f"{token}: an option of torchrun stands before the recipe: tune run {token} {command.recipe} …"
            )
        if not _is_override(token):
            raise UserError(f"{token}: write settings as key=value, or ~key to remove one.")
    command.overrides = overrides
    return command


def _take_own_options(command: Command, tokens: list[str]) -> list[str]:
    """Set the options of tune itself, which may stand anywhere; return the other words."""
    other_tokens: list[str] = []
    remaining = iter(tokens)
    for token in remaining:
        flag, has_value, value = token.partition("=")
        if flag in ("--config", "--simulate", "--fit", "--grace") and not has_value:  # it is the next word
            value = next(remaining, "")
        if flag == "--config":
            if command.config is not None:
                raise UserError("--config is given twice: a run has one config, changed by key=value.")
            command.config = value
            if not value:
                raise UserError("--config needs a value: the name of a config (see `tune ls`) or a YAML file.")
        elif flag in ("--simulate", "--fit"):
            if not value:
                example = "devices, as in 8xH100" if flag == "--simulate" else "80GiB"
                raise UserError(f"{flag} needs a value: {example}.")
            setattr(command, flag[2:], value)
        elif flag == "--grace":
            command.grace = _parse_grace(value)
        elif token == "--dry-run":
            command.dry_run = True
        elif token in ("-h", "--help"):
            command.help = True
        else:
            other_tokens.append(token)
    return other_tokens


def _parse_grace(text: str) -> float:
    """Return the seconds of ``--grace``; raise :class:`UserError` unless they are a positive number."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        option = f"--grace {text}".rstrip()
        raise UserError(f"{option}: give the seconds between the signal that stops the run and the kill, such as 120.")
    return seconds


def _is_override(token: str) -> bool:
    """Return whether a word is ``key=value`` or ``~key``, and not the path of a recipe with "=" in its name."""
    if token.startswith("~"):
        return True
    # os.path.exists: a long setting is not a valid file name, for which pathlib raises
    return "=" in token and not token.startswith("-") and not os.path.exists(token)


def _is_option(token: str) -> bool:
    """Return whether ``token`` is an option of torchrun, with or without its value."""
    # From the help text, because argparse has no public list of a parser's options.
    options = re.findall(r"(?<!\S)--?[a-z][\w-]*", _torchrun_parser().format_help())
    if not token.startswith("--") and token[:2] in options:  # a short option may be joined with its value
        return True
    # argparse takes the beginning of an option for the option, and torchrun underscores for dashes.
    name = token.partition("=")[0].replace("_", "-")
    return any(option.startswith(name) for option in options)


def require_config(command: Command, name: str, options: str = "") -> str:
    """Return the config of a command line.

    Args:
        command: the command line.
        name: the subcommand, for the message.
        options: further options to show.

    Raises:
        UserError: there is none; a YAML file in its place is named with ``--config``.
    """
    if command.config is not None:
        return command.config
    config = "CONFIG"
    if str(command.recipe).endswith((".yaml", ".yml")):
        config = command.recipe
    words = ["tune", name, "--config", config, *options.split()]
    raise UserError(f"tune {name} needs a config: {' '.join(words)}.")


def count_processes(options: list[str], *, exactly: bool = False) -> int | None:
    """Return the maximum number of processes that torchrun would start.

    Args:
        options: torchrun's options from the command line.
        exactly: return ``None`` if the number may change or is not a number.

    Raises:
        UserError: the number is unknown, and ``exactly`` is False.
    """
    if not options:
        return 1
    args = _torchrun_parser().parse_args([*options, "<end>"])
    machines = str(args.nnodes).split(":")  # MIN:MAX, or a number
    per_machine = str(args.nproc_per_node)  # or gpu, cpu, auto …
    are_numbers = machines[-1].isdigit() and per_machine.isdigit()
    if exactly and not (are_numbers and len(set(machines)) == 1):
        return None
    if not are_numbers:
        raise UserError(f"--dry-run needs the number of processes: give numbers, not '{per_machine}'.")
    return int(machines[-1]) * int(per_machine)


def torchrun_arguments(options: list[str], program: list[str]) -> argparse.Namespace:
    """Parse torchrun's options, with the following defaults:

    - ``--standalone`` on one machine.
    - The backend ``c10d`` for ``--rdzv-endpoint`` without a backend or node rank: it assigns node ranks, so that the
      command is the same on all machines.
    - A ``--shutdown-timeout`` that is long enough to save, or the grace period of ``tune run --grace``.

    Args:
        options: torchrun's options from the command line.
        program: ``path …`` or ``--module name …``.
    """
    parser = _torchrun_parser()
    # Without their defaults, these are None unless the command line sets them.
    unset_defaults = {}
    for name in ("rdzv_backend", "node_rank", "master_port"):
        if f"PET_{name.upper()}" not in os.environ:  # torchrun also reads its options from such variables
            unset_defaults[name] = parser.get_default(name)
    parser.set_defaults(**dict.fromkeys(unset_defaults))
    args = parser.parse_args([*options, *program])
    if args.rdzv_endpoint and args.rdzv_backend is None and args.node_rank is None:
        args.rdzv_backend = "c10d"
    if not args.rdzv_endpoint and args.nnodes in ("1", "1:1") and args.master_port is None:
        args.standalone = True
    for name, default in unset_defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    if getattr(args, "shutdown_timeout", 0) is None and "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" not in os.environ:
        args.shutdown_timeout = math.ceil(float(os.environ.get(GRACE_VARIABLE, SHUTDOWN_TIMEOUT)))
    return args


def _torchrun_parser(usage: str = "") -> argparse.ArgumentParser:
    """Return the parser of torchrun, with the name of our command."""
    # Read when torch is imported. In this process, `tune run` explains connections that fail, in place of C++ stack
    # traces; workers show errors, such as NCCL's, without traces of what they only warn about.
    is_default = "TORCH_CPP_LOG_LEVEL" not in os.environ
    if is_default:
        os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"
    from torch.distributed.run import get_args_parser

    if is_default:
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    parser = get_args_parser()
    parser.prog = "tune run"
    parser.usage = usage
    return parser
