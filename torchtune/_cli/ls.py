"""``tune ls``."""

import argparse
import itertools
import re
import textwrap
from collections.abc import Collection

from torchtune._cli._words import families, find, vocabulary
from torchtune._cli.subcommand import Subcommand
from torchtune._recipe_registry import Recipe, get_all_recipes
from torchtune.config._errors import did_you_mean
from torchtune.utils import UserError

_WIDTH = 100
_ENDINGS = ("_single_device", "_distributed")


class List(Subcommand):
    """Lists recipes and their configs."""

    NULL_VALUE = "<>"

    def __init__(self, subparsers: argparse._SubParsersAction) -> None:
        self._parser = subparsers.add_parser(
            "ls",
            prog="tune ls",
            help="List recipes and configs",
            description="List the recipes and the families of models, or the configs that all words describe:\n"
            "a family (qwen3), a size (8B), a method (lora), a device (single_device, distributed), a recipe.",
            formatter_class=argparse.RawTextHelpFormatter,
            epilog=textwrap.dedent("""\
                examples:
                  $ tune ls
                  $ tune ls llama3_2 1B qlora
                  llama3_2
                    llama3_2/1B_qlora_single_device            lora_finetune_single_device
                  ...
                To run a config that it shows:
                  $ tune run --config llama3_2/1B_qlora_single_device
                """),
        )
        self._add_arguments()
        self._parser.set_defaults(func=self._ls_cmd)

    def _add_arguments(self) -> None:
        self._parser.add_argument("words", nargs="*", metavar="WORD", help="what the config must be, all of them")
        self._parser.add_argument("--all", action="store_true", help="every recipe and its configs, in two columns")

    def _ls_cmd(self, args: argparse.Namespace) -> None:
        if args.all and args.words:
            self._parser.error("--all lists every config: leave it out, or the words")
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
        found = find(words)
        if not found:
            raise UserError(_nothing(words))
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
    """The recipes and the families, on a screen."""
    recipes = {recipe.name: recipe for recipe in get_all_recipes()}
    names = _starred(recipes)
    column = max(map(len, names))
    lines = ["RECIPES (*: single_device or distributed); tune cp NAME copies one"]
    for name in names:
        meant = [recipes[full] for full in _meant(name)]
        former = [old for recipe in meant for old in recipe.former_names]
        texts = [_trains(meant[0], _WIDTH - column - 3)]
        if former:
            texts.append(textwrap.shorten(f"also {', '.join(_starred(former))}", _WIDTH - column - 3, placeholder=" …"))
        lines += [f"  {left:<{column}} {text}" for left, text in zip([name, ""], texts, strict=False)]
    lines.append("FAMILIES and their configs; tune ls qwen3 8B lora lists some, tune ls --all lists everything")
    counts = " ".join(f"{family}:{count}" for family, count in families().items())
    return lines + textwrap.wrap(counts, _WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


def _meant(name: str) -> list[str]:
    return [name.replace("_*", ending) for ending in _ENDINGS] if name.endswith("_*") else [name]


def _starred(names: Collection[str]) -> list[str]:
    """Names, of which two that differ in the device are one."""
    kept = []
    for name in names:
        stem = name.removesuffix(_ENDINGS[0]).removesuffix(_ENDINGS[1])
        both = stem != name and all(stem + ending in names for ending in _ENDINGS)
        kept.append(f"{stem}_*" if both else name)
    return list(dict.fromkeys(kept))


def _trains(recipe: Recipe, width: int) -> str:
    """What a recipe trains: the first sentence of its docstring, or as many clauses of it as fit."""
    sentence = recipe.sentence.replace(" on one device", "").replace(" on several devices", "").replace("``", "")
    clauses = [sentence[: found.start()] for found in re.finditer(r"[,:;] | \(", sentence)]
    fitting = [text for text in [*clauses, sentence] if len(text) <= width and text.count("(") == text.count(")")]
    return fitting[-1] if fitting else textwrap.shorten(sentence, width, placeholder=" …")


def _nothing(words: list[str]) -> str:
    """Why no config was found: a word that describes none, or words that exclude each other."""
    unknown = next((word for word in words if not find([word])), None)
    if unknown is None:
        return f"no config is all of {', '.join(words)}: leave a word out."
    hint = did_you_mean(unknown, vocabulary()) or "; `tune ls` shows the families, for example `tune ls qwen3 8B lora`."
    return f"no config is '{unknown}'{hint}"
