"""``tune run``: parse the command line, find the recipe and the config, and run one with the other.

``tune estimate``, which simulates a step instead, ``tune sweep`` and ``tune selfcheck`` take the same words.
"""

import argparse
import itertools
import math
import os
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path

from torchtune._cli._shorthands import expand_shorthands
from torchtune._cli.estimate import dry_run, simulate_run
from torchtune._cli.subcommand import Subcommand
from torchtune._cli.torchrun import (
    count_processes,
    is_torchrun_option,
    run_torchrun,
    torchrun_arguments,
    torchrun_parser,
)
from torchtune._recipe_registry import (
    RecipeTarget,
    are_other_methods,
    current_name,
    find_config,
    find_recipe,
    find_targets,
    get_all_recipes,
    recipe_named_by,
    recipe_of,
    resolve_config,
    resolve_recipe,
)
from torchtune.utils import GRACE_VARIABLE, UserError

USAGE = (
    "tune run [TORCHRUN-OPTIONS] [<recipe>] --config <config> [--dry-run] [--simulate 8xH100] "
    "[--grace SECONDS] "
    "[key=value ...] [~key ...]"
)
# Options of torchrun that conflict with the recipe argument.
_CONFLICTING_OPTIONS = {"module": "--module", "no_python": "--no-python"}


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
        if token.startswith("-") and not is_torchrun_option(token):
            raise UserError(f"{token}: unknown option: settings are key=value, without dashes.")
    # The order of the others: torchrun's options, the recipe, overrides.
    num_options = 0
    if other_tokens and other_tokens[0].startswith("-"):
        # torchrun takes the first word that is no option or value for its script, and leaves all after it.
        parsed = torchrun_parser(USAGE).parse_args([*other_tokens, "<end>"])
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


class Run(Subcommand):
    """Subcommand that runs a recipe."""

    name = "run"
    usage = USAGE
    help = "Run a recipe, in this process or in several through torchrun"
    description = "Check a config, then run a recipe with it."
    epilog = """
        options:
          --config CONFIG    name of a config, or a YAML file; <recipe> is optional if the config names it
          --dry-run          check everything, print memory and steps, and stop
          --simulate 8xH100  run a step on simulated devices (`tune estimate --help`), and stop
          --grace SECONDS    time between the signal that stops the run and the kill: how long workers may save, and
                             a checkpoint that takes longer is written more often
          -h, --help         this text; after a recipe, all of its settings
          key=value          change a setting of the config; key.sub=value inside a section
          ~key               remove a setting
          model=MODEL        of the configs any_*: a checkpoint's folder, a hub repository, or a GGUF file
          data=DATA          a file or folder of rows, or a hub dataset; its format is found
        torchrun's options (see `torchrun --help`) precede the recipe and start one process per device.

        examples:
          $ tune run lora_finetune_single_device --config llama3_2/1B_lora_single_device epochs=2
          $ tune run --config any_lora model=HuggingFaceTB/SmolLM2-135M-Instruct data=chats.jsonl
          $ tune run --config llama3_2/1B_lora_single_device optimizer.lr=2e-4 --dry-run
          $ tune run my_recipe.py --config my_config.yaml
          $ tune run lora_finetune_single_device --help
    """
    takes_tokens = True

    def _run(self, args: argparse.Namespace) -> None:
        command = parse_command(args.tokens)
        if command.help and command.recipe is None and command.config is None:
            self._parser.print_help()
            return
        if command.recipe is None and command.config is None:
            self._parser.error("the following arguments are required: recipe, --config")
        if command.config is None and not find_recipe(command.recipe) and find_config(command.recipe):
            command.config = command.recipe  # tune run CONFIG
            command.recipe = None
        config = None
        if command.config is not None:
            config = resolve_config(command.config, command.recipe)
        elif command.recipe.endswith((".yaml", ".yml")):  # a config's path: find_config knows names, not paths
            self._parser.error(f"The '--config' argument is required: tune run --config {command.recipe}")
        if command.recipe is None:  # the config names it
            recipe = recipe_named_by(config)
        else:
            recipe = resolve_recipe(command.recipe)
            is_former_name = current_name(command.recipe) != command.recipe
            # The check of the config has to know a former name, which may require settings, as qat_* does. A config of
            # another method must not get the name: that difference is then the error.
            if is_former_name and config is not None and not are_other_methods(command.recipe, recipe_of(config) or ""):
                command.overrides.insert(0, f"recipe={command.recipe}")  # first: a later recipe= of the user's counts
        if command.help:
            from torchtune.config import describe_settings, settings_of

            print(describe_settings(settings_of(recipe.load_main())), end="")
            return
        if config is None:
            self._parser.error("The '--config' argument is required.")
        # Settings in the place of model=, teacher= and data=, if the command line has any; others are as they are.
        command.overrides = expand_shorthands(config, command.overrides, command.recipe)
        if command.recipe is None:
            recipe = recipe_named_by(config, command.overrides)  # the rows of data= may choose another recipe
        if command.grace is not None:  # for torchrun and the workers
            os.environ[GRACE_VARIABLE] = str(command.grace)
        if command.simulate or command.fit:
            _simulate(recipe, config, command)
        elif command.dry_run:
            self._dry_run(recipe, config, command)
        elif command.torchrun:
            self._run_distributed(recipe, config, command)
        else:
            self._check_distributed(recipe, wanted=False)
            run_here(recipe, config, command.overrides)

    def _dry_run(self, recipe: RecipeTarget, config: Path, command: Command) -> None:
        """Print the requirements of a run, and finally the errors that prevent its start."""
        from torchtune.config import load_and_check

        self._check_distributed(recipe, wanted=bool(command.torchrun))
        main = recipe.load_main()
        dry_run(main, load_and_check(config, command.overrides, main), count_processes(command.torchrun))

    def _run_distributed(self, recipe: RecipeTarget, config: Path, command: Command) -> None:
        """Check the config once, then start one process per device with torchrun."""
        from torchtune.config import load_and_check
        from torchtune.estimate import check_run

        self._check_distributed(recipe, wanted=True)
        settings = load_and_check(config, command.overrides, recipe.load_main())
        processes = count_processes(command.torchrun, exactly=True)
        if processes is not None:  # otherwise the number is known to the workers alone, which check it
            # Check before the workers start, so that errors are printed once; workers check the rank-dependent
            # settings.
            check_run(settings, processes)
        program = ["--module", recipe.module]
        if recipe.path is not None:
            program = [str(recipe.path)]
        args = torchrun_arguments(command.torchrun, [*program, "--config", str(config), *command.overrides])
        # Workers import from the current directory, too, as a run in this process does.
        paths = (os.environ.get("PYTHONPATH", ""), os.getcwd())
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        print("Running with torchrun...", flush=True)
        run_torchrun(args)

    def _check_distributed(self, recipe: RecipeTarget, *, wanted: bool) -> None:
        """Refuse several processes for a recipe of one process, and one process for a recipe of several."""
        if not recipe.registered:
            return
        entry = next(entry for entry in get_all_recipes() if entry.name == recipe.name)
        if not entry.groups:  # a user's recipe inside a checkout has no entry in features.yaml
            return
        if wanted and not entry.supports_distributed:
            alternative = ""
            distributed_name = recipe.name.replace("_single_device", "_distributed")
            if distributed_name != recipe.name and find_recipe(distributed_name):
                alternative = f"run {distributed_name}, or "
            self._parser.error(
                f"Recipe {recipe.name} runs in one process and does not support distributed training: {alternative}"
                "remove torchrun's options."
            )
        if entry.supports_distributed and not wanted and "one_device" not in entry.groups:
            self._parser.error(
                f"Recipe {recipe.name} runs in several processes: give their number, for example "
                f"tune run --nproc-per-node 2 {recipe.name} --config ..."
            )


def run_here(recipe: RecipeTarget, config: Path, overrides: list[str]) -> None:
    """Run in this process, as ``python recipe.py --config …`` does; the recipe's decorator checks the config."""
    sys.argv = [str(recipe.path or recipe.module), "--config", str(config), *overrides]
    if recipe.path is not None:
        sys.path.insert(0, str(recipe.path.parent))
        runpy.run_path(str(recipe.path), run_name="__main__")
    else:
        runpy.run_module(recipe.module, run_name="__main__", alter_sys=True)


def _simulate(recipe: RecipeTarget, config: Path, command: Command) -> None:
    """Simulate a step of a recipe on the devices of ``--simulate``."""
    if command.simulate is None:
        raise UserError("--simulate is missing: name the devices, for example --simulate 8xH100.")
    if command.torchrun:
        raise UserError(f"{command.torchrun[0]}: --simulate sets the number of processes: remove the option.")
    simulate_run(recipe, config, command.overrides, command.simulate, command.fit)


class Estimate(Subcommand):
    """Subcommand that simulates a step of a recipe on any devices."""

    name = "estimate"
    usage = "tune estimate [<recipe>] --config <config> --simulate 8xH100 [--fit 80GiB] [key=value ...]"
    help = "Simulate a step of a recipe on any number of devices: memory, time, cost"
    description = (
        "Run a step of a recipe on a simulated cluster, without weights, data and devices.\n"
        "The same as tune run --dry-run --simulate."
    )
    epilog = """
        options:
          --simulate NxDEVICE  H100, H200, B200, A100, L40S, RTX4090, RTX5090 or MI300X; without N, one
          --fit MEMORY         search for the fastest settings that fit in this memory, for example 80GiB

        examples:
          $ tune estimate --config llama3_1/8B_full --simulate 8xH100
          $ tune estimate my_recipe.py --config my_config.yaml --simulate RTX4090 --fit 24GB
    """
    takes_tokens = True

    def _run(self, args: argparse.Namespace) -> None:
        command = parse_command(args.tokens)
        if command.help or not args.tokens:
            self._parser.print_help()
            return
        recipe, config = find_targets(command.recipe, require_config(command, self.name, "--simulate 8xH100"))
        command.overrides = expand_shorthands(config, command.overrides, command.recipe)
        if command.recipe is None:
            recipe = recipe_named_by(config, command.overrides)  # the rows may choose another one
        _simulate(recipe, config, command)
