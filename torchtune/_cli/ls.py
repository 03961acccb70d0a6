"""``tune ls``."""

import argparse
import textwrap

from torchtune._cli.subcommand import Subcommand
from torchtune._recipe_registry import get_all_recipes


class List(Subcommand):
    """Lists recipes and their configs."""

    NULL_VALUE = "<>"

    def __init__(self, subparsers: argparse._SubParsersAction) -> None:
        self._parser = subparsers.add_parser(
            "ls",
            prog="tune ls",
            help="List all recipes and configs",
            description="List all recipes and, beside each, the configs that were written for it.",
            formatter_class=argparse.RawTextHelpFormatter,
            epilog=textwrap.dedent("""\
                examples:
                  $ tune ls
                  RECIPE                                   CONFIG
                  full_finetune_single_device              llama3_2/1B_full_single_device
                  ...
                To run one of these recipes:
                  $ tune run full_finetune_single_device --config llama3_2/1B_full_single_device
                """),
        )
        self._parser.set_defaults(func=self._ls_cmd)

    def _ls_cmd(self, args: argparse.Namespace) -> None:
        def row(recipe: str, config: str) -> None:
            print(f"{recipe:<40} {config:<40}")

        row("RECIPE", "CONFIG")
        for recipe in get_all_recipes():
            names = [config.name for config in recipe.configs] or [self.NULL_VALUE]
            for index, name in enumerate(names):
                row(recipe.name if index == 0 else "", name)
