"""``tune run``."""

import argparse
import os
import runpy
import sys
from pathlib import Path

from torchtune._cli._find_recipe import RecipeTarget, recipe_named_by, resolve_config, resolve_recipe
from torchtune._cli._run_command import USAGE, Command, parse_command
from torchtune._cli._shorthands import expand_shorthands
from torchtune._cli._torchrun import count_processes, run, torchrun_arguments
from torchtune._cli.subcommand import Subcommand
from torchtune._recipe_registry import (
    are_other_methods,
    current_name,
    find_config,
    find_recipe,
    get_all_recipes,
    recipe_of,
)
from torchtune.utils import GRACE_VARIABLE


def run_here(recipe: RecipeTarget, config: Path, overrides: list[str]) -> None:
    """Run in this process, as ``python recipe.py --config …`` does; the recipe's decorator checks the config."""
    sys.argv = [str(recipe.path or recipe.module), "--config", str(config), *overrides]
    if recipe.path is not None:
        sys.path.insert(0, str(recipe.path.parent))
        runpy.run_path(str(recipe.path), run_name="__main__")
    else:
        runpy.run_module(recipe.module, run_name="__main__", alter_sys=True)


def _former_name(command: Command, config: Path) -> str | None:
    """Return the recipe's former name if the command uses one; a former name may require settings, as qat_* does.

    Return ``None`` if the config is for another method, because then this is the error to report.
    """
    name = command.recipe
    if name is None or current_name(name) == name or are_other_methods(name, recipe_of(config) or name):
        return None
    return name


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
        config = None if command.config is None else resolve_config(command.config, command.recipe)
        is_config = command.recipe is not None and command.recipe.endswith((".yaml", ".yml"))
        if config is None and is_config:
            self._parser.error(f"The '--config' argument is required: tune run --config {command.recipe}")
        recipe = recipe_named_by(config) if command.recipe is None else resolve_recipe(command.recipe)
        if config is not None:
            former_name = _former_name(command, config)
            if former_name is not None:
                command.overrides.insert(0, f"recipe={former_name}")
        if command.help:
            self._print_settings(recipe)
            return
        if config is None:
            self._parser.error("The '--config' argument is required.")
        command.overrides = expand_shorthands(config, command.overrides, command.recipe)
        if command.recipe is None:
            recipe = recipe_named_by(config, command.overrides)  # the rows may choose another one
        if command.grace is not None:
            os.environ[GRACE_VARIABLE] = str(command.grace)
        if command.simulate or command.fit:
            from torchtune._cli.estimate import estimate

            estimate(recipe, config, command)
        elif command.dry_run:
            self._dry_run(recipe, config, command)
        elif command.torchrun:
            self._run_distributed(recipe, config, command)
        else:
            self._check_distributed(recipe, wanted=False)
            run_here(recipe, config, command.overrides)

    def _print_settings(self, recipe: RecipeTarget) -> None:
        from torchtune.config import describe_settings, settings_of

        print(describe_settings(settings_of(recipe.load_main())), end="")

    def _dry_run(self, recipe: RecipeTarget, config: Path, command: Command) -> None:
        """Print the requirements of a run, and finally the errors that prevent its start."""
        from torchtune._cli.estimate import dry_run
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
        if processes is not None:
            # Check before the workers start, so that errors are printed once; workers check the rank-dependent
            # settings.
            check_run(settings, processes)
        program = [str(recipe.path)] if recipe.path is not None else ["--module", recipe.module]
        args = torchrun_arguments(command.torchrun, [*program, "--config", str(config), *command.overrides])
        # Workers import from the current directory, too, as a run in this process does.
        paths = (os.environ.get("PYTHONPATH", ""), os.getcwd())
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        print("Running with torchrun...", flush=True)
        run(args)

    def _check_distributed(self, recipe: RecipeTarget, *, wanted: bool) -> None:
        if not recipe.registered:
            return
        entry = next(entry for entry in get_all_recipes() if entry.name == recipe.name)
        if not entry.groups:  # a user's recipe inside a checkout has no entry in features.yaml
            return
        if wanted and not entry.supports_distributed:
            distributed_name = recipe.name.replace("_single_device", "_distributed")
            has_distributed = distributed_name != recipe.name and find_recipe(distributed_name)
            alternative = f"run {distributed_name}, or " if has_distributed else ""
            self._parser.error(
                f"Recipe {recipe.name} runs in one process and does not support distributed training: {alternative}"
                "remove torchrun's options."
            )
        if entry.supports_distributed and not wanted and "one_device" not in entry.groups:
            self._parser.error(
                f"Recipe {recipe.name} runs in several processes: give their number, for example "
                f"tune run --nproc-per-node 2 {recipe.name} --config ..."
            )
