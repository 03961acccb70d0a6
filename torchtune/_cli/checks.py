"""Commands that check: ``tune validate`` with ``tune schema``, ``tune checkpoint verify`` and ``tune selfcheck``."""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from torchtune._cli._shorthands import expand_shorthands
from torchtune._cli.run import parse_command, require_config
from torchtune._cli.subcommand import Subcommand
from torchtune._recipe_registry import (
    find_targets,
    get_all_recipes,
    recipe_named_by,
    recipe_of,
    resolve_config,
    resolve_recipe,
)
from torchtune.utils import UserError


class Validate(Subcommand):
    """Subcommand that checks a config without running it."""

    name = "validate"
    help = "Check a config without running it"
    description = (
        "Check a config: keys, types and choices against its recipe, components against their\n"
        "signatures. All mistakes are shown at once."
    )
    epilog = """
        examples:
          $ tune validate llama3_2/1B_lora_single_device
          Config is well-formed!
          $ tune validate my_config.yaml optimizer.lr=2e-4
    """

    def _add_arguments(self) -> None:
        self._parser.add_argument("config", help="name of a config, or path of a YAML file")
        overrides = "key=value: settings of the config to change"
        self._parser.add_argument("overrides", nargs="*", default=[], help=overrides)

    def _run(self, args: argparse.Namespace) -> None:
        from omegaconf import DictConfig

        from torchtune.config import load_and_check

        config = resolve_config(args.config)
        recipe = DictConfig
        if recipe_of(config) is not None:
            recipe = recipe_named_by(config).load_main()
        load_and_check(config, expand_shorthands(config, args.overrides), recipe)
        print("Config is well-formed!")
        if recipe is DictConfig:
            print("It names no recipe: only components were checked, and no other setting.")


class Schema(Subcommand):
    """Subcommand that prints the JSON schema of a recipe's config, or of all recipes' configs."""

    name = "schema"
    help = "Print the JSON schema of a recipe's config, for editors and agents"
    description = (
        "Print the JSON schema (draft 2020-12) of a recipe's config: every key with its type, bounds,\n"
        "default and comment. Without a recipe, the schema of every shipped recipe, chosen by the\n"
        "config's key `recipe`. Components are checked by `tune validate`, which reads their signatures."
    )
    epilog = """
        examples:
          $ tune schema lora_finetune_single_device > lora.schema.json
          $ tune schema > torchtune.schema.json
        An editor with a YAML language server checks a config that begins with
          # yaml-language-server: $schema=torchtune.schema.json
    """

    def _add_arguments(self) -> None:
        self._parser.add_argument("recipe", nargs="?", help="name of a recipe, or path of its file")

    def _run(self, args: argparse.Namespace) -> None:
        from torchtune.config import json_schema

        if args.recipe is None:
            schema = _schema_of_all_recipes()
        else:
            schema = json_schema(resolve_recipe(args.recipe).load_main())
        print(json.dumps(schema, indent=2))


def _schema_of_all_recipes() -> dict[str, Any]:
    """Return a schema in which the key ``recipe`` of a config chooses the schema of its settings."""
    from torchtune.config import json_schema

    definitions = {}
    choices = []
    names = []
    for recipe in get_all_recipes():
        schema = json_schema(resolve_recipe(recipe.name).load_main())
        dialect = schema.pop("$schema")  # the same of all, and only for the root of a schema
        definitions[recipe.name] = schema
        recipe_names = [recipe.name, *recipe.former_names]  # configs of earlier releases have a former name
        names += recipe_names
        has_this_recipe = {"properties": {"recipe": {"enum": recipe_names}}, "required": ["recipe"]}
        pointer = recipe.name.replace("~", "~0").replace("/", "~1")  # in a JSON pointer (RFC 6901)
        choices.append({"if": has_this_recipe, "then": {"$ref": f"#/$defs/{pointer}"}})
    return {
        "$schema": dialect,
        "type": "object",
        "properties": {"recipe": {"enum": names, "description": "Name of the recipe that the config is for."}},
        "required": ["recipe"],
        "allOf": choices,
        "$defs": definitions,
    }


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


class Selfcheck(Subcommand):
    """Subcommand that checks a recipe, its config and its data with short runs."""

    name = "selfcheck"
    usage = "tune selfcheck [<recipe>] --config <config> [key=value ...]"
    help = "Check your recipe, config and data with short runs: accumulation, packing, resume, saving, labels"
    description = (
        "Run a recipe for a few steps in several ways that must give the same result, and compare its\n"
        "labels with the conversations. The exit code is 0, or 1 if a check fails."
    )
    epilog = """
        examples:
          $ tune selfcheck --config smol/135M_lora_single_device dataset.data_files=mine.jsonl
          $ tune selfcheck my_recipe.py --config my_config.yaml dtype=bf16
    """
    takes_tokens = True

    def _run(self, args: argparse.Namespace) -> None:
        command = parse_command(args.tokens)
        if command.help or not args.tokens:
            self._parser.print_help()
            return
        config_name = require_config(command, self.name)
        from torchtune._cli._selfchecks import selfcheck

        recipe, config = find_targets(command.recipe, config_name)
        command.overrides = expand_shorthands(config, command.overrides)
        folder = Path(tempfile.mkdtemp(prefix="torchtune-selfcheck-"))
        num_failed = 0
        for verdict in selfcheck(recipe, config, command.overrides, folder):
            print(f"{verdict.name:<14}{verdict.state:<13}{verdict.reason}", flush=True)
            if verdict.state == "failed":
                num_failed += 1
                print(f"{'':<14}to see more: {verdict.more}", flush=True)
        if num_failed:
            print(f"{num_failed} checks failed; their runs are in {folder}.")
            sys.exit(1)
        shutil.rmtree(folder)
