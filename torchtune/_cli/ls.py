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
            self._print_matches(args.words)
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

    def _print_matches(self, words: list[str]) -> None:
        matches = find_configs(words)
        if not matches:
            raise UserError(_explain_no_match(words))
        matches.sort(key=lambda pair: (not pair[0].family, pair[0].order))  # configs of no family are last
        for family, pairs in itertools.groupby(matches, key=lambda pair: pair[0].family):
            print(family or "of no family")
            for config, recipe in pairs:
                print(f"  {config.name:<42} {recipe.name}")
        matching_recipes = {recipe.name for _, recipe in matches}
        num_configs = 0
        for recipe in get_all_recipes():
            num_configs += len(recipe.configs)
            if recipe.former_names and recipe.name in matching_recipes:
                print(f"{recipe.name}: also {', '.join(recipe.former_names)}")
        print(f"{len(matches)} of {num_configs} configs. To run one: tune run --config NAME")


def overview() -> list[str]:
    """Return the recipes and model families as lines that fit a screen."""
    recipes = {recipe.name: recipe for recipe in get_all_recipes()}
    groups = _merge_devices(recipes)
    column = max(map(len, groups))
    lines = ["RECIPES (*: single_device or distributed); tune cp NAME copies one"]

    def row(left: str, text: str) -> None:
        lines.append(f"  {left:<{column}} {textwrap.shorten(text, _WIDTH - column - 3, placeholder=' …')}")

    for name, recipe_names in groups.items():
        # Both recipes of a group have the same sentence, apart from the device.
        sentence = recipes[recipe_names[-1]].sentence
        row(name, re.sub(" on (one device|several devices)|`", "", sentence))
        former_names: list[str] = []
        for recipe_name in recipe_names:
            former_names += recipes[recipe_name].former_names
        if former_names:
            row("", f"also {', '.join(_merge_devices(former_names))}")
    lines.append("FAMILIES and their configs; tune ls qwen3 8B lora lists some, tune ls --all lists everything")
    counts = " ".join(f"{family}:{count}" for family, count in families().items())
    return lines + textwrap.wrap(counts, _WIDTH, initial_indent="  ", subsequent_indent="  ")


def _merge_devices(names: Iterable[str]) -> dict[str, list[str]]:
    """Group names that differ only in the device: ``full_finetune_*`` -> the full names."""
    groups: dict[str, list[str]] = {}
    for name in names:
        stem = re.sub("_(single_device|distributed)$", "", name)
        groups.setdefault(stem, []).append(name)
    labelled = {}
    for stem, group in groups.items():
        label = f"{stem}_*" if len(group) > 1 else group[0]
        labelled[label] = group
    return labelled


def _explain_no_match(words: list[str]) -> str:
    """Return why no config was found: a word without any match, or words without a common match."""
    for word in words:
        if not find_configs([word]):
            hint = did_you_mean(word, search_words())
            hint = hint or "; `tune ls` shows the families, for example `tune ls qwen3 8B lora`."
            return f"no config matches '{word}'{hint}"
    return f"no config matches all of {', '.join(words)}: remove a word."
