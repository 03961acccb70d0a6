"""The command line of ``tune run`` and of the commands that take the same words."""

import itertools
import math
import os
from dataclasses import dataclass

from torchtune._cli._torchrun import count_options, is_option
from torchtune.utils import UserError

USAGE = (
    "tune run [TORCHRUN-OPTIONS] [<recipe>] --config <config> [--dry-run] [--simulate 8xH100] "
    "[--grace SECONDS] "
    "[key=value ...] [~key ...]"
)


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


def _is_override(token: str) -> bool:
    # os.path.exists: a long setting is not a valid file name, for which pathlib raises
    return token.startswith("~") or ("=" in token and not token.startswith("-") and not os.path.exists(token))


def _parse_grace(text: str) -> float:
    """Return the seconds of ``--grace``; raise :class:`UserError` unless they are a positive number."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise UserError(
            f"--grace {text}".rstrip() + ": give the seconds between the signal that stops the run and the kill, such "
            "as 120."
        )
    return seconds


def parse_command(tokens: list[str]) -> Command:
    """Parse a command line.

    Raises:
        UserError: an option is unknown, misplaced or lacks its value.
    """
    command = Command([], None, None, [])
    # First take tune's own options, which may stand anywhere.
    other_tokens: list[str] = []
    remaining = iter(tokens)
    for token in remaining:
        flag, has_value, value = token.partition("=")
        if flag == "--config":
            if command.config is not None:
                raise UserError("--config is given twice: a run has one config, changed by key=value.")
            command.config = value if has_value else next(remaining, None)
            if not command.config:
                raise UserError("--config needs a value: the name of a config (see `tune ls`) or a YAML file.")
        elif flag in ("--simulate", "--fit"):
            value = value if has_value else next(remaining, None)
            if not value:
                example = "devices, as in 8xH100" if flag == "--simulate" else "80GiB"
                raise UserError(f"{flag} needs a value: {example}.")
            setattr(command, flag[2:], value)
        elif flag == "--grace":
            command.grace = _parse_grace(value if has_value else next(remaining, ""))
        elif token == "--dry-run":
            command.dry_run = True
        elif token in ("-h", "--help"):
            command.help = True
        else:
            other_tokens.append(token)
    for token in other_tokens:
        if token.startswith("-") and not is_option(token):
            raise UserError(f"{token}: unknown option: settings are key=value, without dashes.")
    # The order of the others: torchrun's options, the recipe, overrides.
    num_options = count_options(other_tokens, USAGE)
    command.torchrun = other_tokens[:num_options]
    overrides = other_tokens[num_options:]
    if overrides and not _is_override(overrides[0]):
        command.recipe = overrides.pop(0)
    for token, value in itertools.zip_longest(overrides, overrides[1:], fillvalue=""):
        if token.startswith("-"):
            if "=" not in token and not value.startswith("-") and not _is_override(value):
                token = f"{token} {value}".rstrip()
            raise UserError(
                f"{token}: an option of torchrun stands before the recipe: tune run {token} {command.recipe} …"
            )
        if not _is_override(token):
            raise UserError(f"{token}: write settings as key=value, or ~key to remove one.")
    command.overrides = overrides
    return command


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
    is_file = str(command.recipe).endswith((".yaml", ".yml"))
    words = ["tune", name, "--config", command.recipe if is_file else "CONFIG", *options.split()]
    raise UserError(f"tune {name} needs a config: {' '.join(words)}.")
