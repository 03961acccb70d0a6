"""``tune ls``."""

import argparse
import itertools
import re
import textwrap
from collections.abc import Iterable

from torchtune._cli._find_recipe import families, find_configs, search_words
from torchtune._cli.subcommand import Subcommand
from torchtune._recipe_registry import get_all_recipes
from torchtune.config import did_you_mean
from torchtune.utils import UserError

_WIDTH = 100


class List(Subcommand):
    """Subcommand that lists recipes and configs."""

    NULL_VALUE = "<>"

    name = "ls"
    help = "List recipes and configs"
    description = (
        "List recipes and model families, or the configs that match all words:\n"
        "a family (qwen3), a size (8B), a method (lora), a device (single_device, distributed), a recipe."
    )
    epilog = """
        examples:
          $ tune ls
          $ tune ls llama3_2 1B qlora
          llama3_2
            llama3_2/1B_qlora_single_device            lora_finetune_single_device
          ...
        To run one of them:
          $ tune run --config llama3_2/1B_qlora_single_device
    """

    def _add_arguments(self) -> None:
        self._parser.add_argument("words", nargs="*", metavar="WORD", help="word that the configs must match")
        self._parser.add_argument("--all", action="store_true", help="list all recipes and configs, in two columns")

    def _run(self, args: argparse.Namespace) -> None:
        if args.all and args.words:
            self._parser.error("--all lists every config: remove it, or the words")
        if args.all:
            self._print_all()
        elif args.words:
            self._print_found(args.words)
        else:
            print("\n".join(overview()))

    def _print_all(self) -> None:
        def row(recipe: str, config: str) -> None:
            print(f"{recipe:<40} {config:<40}")

        row("RECIPE", "CONFIG")
        for recipe in get_all_recipes():
            names = [config.name for config in recipe.configs] or [self.NULL_VALUE]
            for index, name in enumerate(names):
                row(recipe.name if index == 0 else "", name)

    def _print_found(self, words: list[str]) -> None:
        found = find_configs(words)
        if not found:
            raise UserError(_explain_no_match(words))
        found.sort(key=lambda pair: (not pair[0].family, pair[0].order))
        for family, pairs in itertools.groupby(found, key=lambda pair: pair[0].family):
            print(family or "of no family")
            for config, recipe in pairs:
                print(f"  {config.name:<42} {recipe.name}")
        for recipe in get_all_recipes():
            if recipe.former_names and any(recipe is other for _, other in found):
                print(f"{recipe.name}: also {', '.join(recipe.former_names)}")
        every = sum(len(recipe.configs) for recipe in get_all_recipes())
        print(f"{len(found)} of {every} configs. To run one: tune run --config NAME")


def overview() -> list[str]:
    """Return the recipes and model families as lines that fit a screen."""
    recipes = {recipe.name: recipe for recipe in get_all_recipes()}
    groups = _merge_devices(recipes)
    column = max(map(len, groups))
    lines = ["RECIPES (*: single_device or distributed); tune cp NAME copies one"]

    def row(left: str, text: str) -> None:
        lines.append(f"  {left:<{column}} {textwrap.shorten(text, _WIDTH - column - 3, placeholder=' …')}")

    for name, meant in groups.items():
        row(name, re.sub(" on (one device|several devices)|`", "", recipes[meant[-1]].sentence))
        former = [old for full in meant for old in recipes[full].former_names]
        if former:
            row("", f"also {', '.join(_merge_devices(former))}")
    lines.append("FAMILIES and their configs; tune ls qwen3 8B lora lists some, tune ls --all lists everything")
    counts = " ".join(f"{family}:{count}" for family, count in families().items())
    return lines + textwrap.wrap(counts, _WIDTH, initial_indent="  ", subsequent_indent="  ")


def _merge_devices(names: Iterable[str]) -> dict[str, list[str]]:
    """Group names that differ only in the device: ``full_finetune_*`` -> the full names."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub("_(single_device|distributed)$", "", name), []).append(name)
    return {f"{stem}_*" if len(group) > 1 else group[0]: group for stem, group in groups.items()}


def _explain_no_match(words: list[str]) -> str:
    """Return why no config was found: a word without any match, or words without a common match."""
    unknown = next((word for word in words if not find_configs([word])), None)
    if unknown is None:
        return f"no config matches all of {', '.join(words)}: remove a word."
    hint = (
        did_you_mean(unknown, search_words()) or "; `tune ls` shows the families, for example `tune ls qwen3 8B lora`."
    )
    return f"no config matches '{unknown}'{hint}"
