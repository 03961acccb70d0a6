"""``tune validate``."""

import argparse

from torchtune._cli._find_recipe import recipe_named_by, resolve_config
from torchtune._cli.subcommand import Subcommand
from torchtune._recipe_registry import recipe_of


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
        recipe = DictConfig if recipe_of(config) is None else recipe_named_by(config).load_main()
        load_and_check(config, args.overrides, recipe)
        print("Config is well-formed!")
        if recipe is DictConfig:
            print("It names no recipe: only components were checked, and no other setting.")
