"""``tune ls``, ``tune cp`` and ``tune cat``: list, copy and print recipes and configs."""

import argparse
import itertools
import os
import re
import shutil
import textwrap
from collections.abc import Iterable
from pathlib import Path

from torchtune._cli._shorthands import expand_shorthands
from torchtune._cli.subcommand import Subcommand
from torchtune._config_templates import configs_on_demand, impossible_configs, reason_against
from torchtune._recipe_registry import (
    Config,
    families,
    find_config,
    find_configs,
    find_recipe,
    get_all_recipes,
    search_words,
    suggest_configs,
)
from torchtune.config import did_you_mean
from torchtune.utils import UserError, atomic_write

_WIDTH = 100
_EXTENSION = re.compile(r"\.[A-Za-z]{1,4}")  # does not match the ".6B_lora" of "0.6B_lora"


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
        """Print each recipe with its configs, in two columns that programs can read."""

        def row(recipe: str, config: str) -> None:
            print(f"{recipe:<40} {config:<40}")

        row("RECIPE", "CONFIG")
        for recipe in get_all_recipes():
            names = [config.name for config in recipe.configs] or [self.NULL_VALUE]
            row(recipe.name, names[0])
            for name in names[1:]:
                row("", name)

    def _print_matches(self, words: list[str]) -> None:
        """Print the configs that match all words: files, those made when they are named, and those that cannot be."""
        matches = find_configs(words)
        on_demand = find_configs(words, "on_demand")
        models = {_model_of(config) for config, _ in [*matches, *on_demand]}
        models.discard(None)  # of configs that are files
        impossible = find_configs(words, "impossible")
        if not matches and not on_demand:
            if not impossible:
                raise UserError(_explain_no_match(words))
            models = {_model_of(config) for config, _ in impossible}  # the reasons against them are the answer
        matches.sort(key=lambda pair: (not pair[0].family, pair[0].order))  # configs of no family are last
        for family, pairs in itertools.groupby(matches, key=lambda pair: pair[0].family):
            print(family or "of no family")
            for config, recipe in pairs:
                print(f"  {config.name:<42} {recipe.name}")
        matching_recipes = {recipe.name for _, recipe in matches}
        for recipe in get_all_recipes():
            if recipe.former_names and recipe.name in matching_recipes:
                print(f"{recipe.name}: also {', '.join(recipe.former_names)}")
        methods_by_model: dict[str, list[str]] = {}
        for config, _ in on_demand:
            model, method = configs_on_demand()[config.name]
            methods_by_model.setdefault(model, []).append(method)
        if on_demand:
            print(f"MODEL_METHOD, as {on_demand[0][0].name}: {len(on_demand):,} more, made when they are named")
        for model, methods in methods_by_model.items():
            print(f"{model}: {', '.join(methods)}")
        if len(models) == 1:  # the reasons of many models would hide the configs
            methods_by_reason: dict[str, list[str]] = {}
            for config, _ in impossible:
                model, method = impossible_configs()[config.name]
                methods_by_reason.setdefault(reason_against(model, method), []).append(method)
            for reason, methods in methods_by_reason.items():
                print(f"not {', '.join(methods)}: {reason}")
        num_configs = sum(len(recipe.configs) for recipe in get_all_recipes()) + len(configs_on_demand())
        print(f"{len(matches) + len(on_demand):,} of {num_configs:,} configs. To run one: tune run --config NAME")


def _model_of(config: Config) -> str | None:
    """Return the model of a config that is no file; None for a file."""
    combination = configs_on_demand().get(config.name) or impossible_configs().get(config.name)
    if combination is None:
        return None
    model, _ = combination
    return model


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
    num_files = sum(len(recipe.configs) for recipe in recipes.values())
    lines.append(
        f"FAMILIES: {num_files} configs, {len(configs_on_demand()):,} on demand; tune ls qwen3 8B lists some, tune ls "
        "--all the files"
    )
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
        if len(group) > 1:
            labelled[f"{stem}_*"] = group
        else:
            labelled[group[0]] = group
    return labelled


def _explain_no_match(words: list[str]) -> str:
    """Return why no config was found: a word without any match, or words without a common match."""
    for word in words:
        if not find_configs([word]) and not find_configs([word], "on_demand"):
            hint = did_you_mean(word, search_words())
            hint = hint or "; `tune ls` shows the families, for example `tune ls qwen3 8B lora`."
            return f"no config matches '{word}'{hint}"
    return f"no config matches all of {', '.join(words)}: remove a word."


def destination_of(source: Path, destination: str) -> Path:
    """Return the path for a copy of ``source``: inside a directory, or a file with the same suffix."""
    path = Path(destination)
    if path.is_dir() or destination.endswith(("/", os.sep)):
        return path / source.name
    if path.suffix == source.suffix or (source.suffix == ".yaml" and path.suffix == ".yml"):
        return path
    if _EXTENSION.fullmatch(path.suffix):
        return path.with_suffix(source.suffix)
    return path.with_name(path.name + source.suffix)


def back_up(path: Path, content: bytes) -> Path | None:
    """Copy ``path`` to ``<name>.bak`` (or ``.bak1``, …) unless it equals ``content``.

    Returns:
        The backup, or ``None`` if there is nothing to back up.
    """
    if not path.is_file():
        return None
    previous = path.read_bytes()
    if previous == content:
        return None
    backup = path.with_name(f"{path.name}.bak")
    number = 0
    while os.path.lexists(backup):  # also a link to nothing
        if backup.is_file() and backup.read_bytes() == previous:  # this content is kept already
            return backup
        number += 1
        backup = path.with_name(f"{path.name}.bak{number}")
    with atomic_write(backup, private=True) as file:  # until copystat gives the backup the permissions of the file
        file.write(previous)
    shutil.copystat(path, backup)
    return backup


def changed_text(config: Path, overrides: list[str]) -> str:
    """Return the text of a config with overrides; settings that they do not change keep their lines and comments.

    Args:
        config: file of the config.
        overrides: ``key=value`` and ``~key`` of a command line.

    Raises:
        ConfigError: the file is no config, or an override cannot be applied.
    """
    from torchtune.config import apply_overrides, read_document

    overrides = expand_shorthands(config, overrides)
    original = read_document(config)
    document = read_document(config)
    apply_overrides(document, overrides)
    document.check()
    # A section whose value is the same keeps its lines; one that has changed is written anew, without its comments.
    lines = []
    key = ""  # top-level key of the current line
    for line in config.read_text(encoding="utf-8-sig").splitlines(keepends=True):
        is_key = line[:1] not in (" ", "-", "#", "\n")  # a list may begin at the column of its key
        is_within = line[:1] in (" ", "-")
        if is_key:
            key = line.partition(":")[0].strip("\"'")
        is_changed = (is_key or is_within) and document.data.get(key) != original.data.get(key)
        if not is_changed:
            lines.append(line)
        elif is_key and key in document.data:
            lines.append(_yaml_of(key, document.data[key]))
    for key in document.data.keys() - original.data.keys():  # set by the command line alone
        lines.append(_yaml_of(key, document.data[key]))
    return "".join(lines)


def _yaml_of(key: str, value: object) -> str:
    """Return a setting as YAML; a text stays in one line."""
    import yaml

    return yaml.safe_dump({key: value}, sort_keys=False, allow_unicode=True, width=1000)


class Copy(Subcommand):
    """Subcommand that copies a recipe or a config for editing."""

    name = "cp"
    usage = "tune cp <recipe|config> destination [OPTIONS] [key=value ...]"
    help = "Copy a recipe or config to change it"
    description = (
        "Copy a recipe or config to a file or into a directory, to change it.\n"
        "An existing file with other content is kept as <name>.bak. With key=value, the copy of a config\n"
        "has these settings; model= and data= are written as the settings that they stand for."
    )
    epilog = """
        examples:
          $ tune cp lora_finetune_single_device my_recipe.py
          Copied file to my_recipe.py

          $ tune cp llama3_2/1B_lora_single_device configs/ --make-parents
          Copied file to configs/1B_lora_single_device.yaml

          $ tune cp any_lora my_config.yaml model=HuggingFaceTB/SmolLM2-135M-Instruct data=chats.jsonl
          Copied file to my_config.yaml
        To see what can be copied, run `tune ls`.
    """

    def _add_arguments(self) -> None:
        self._parser.add_argument("file", help="name of a recipe or config, as `tune ls` shows it")
        self._parser.add_argument("destination", help="file or directory to copy it to")
        self._parser.add_argument(
            "overrides", nargs="*", default=[], help="key=value: settings of the config to change"
        )
        self._parser.add_argument("-n", "--no-clobber", action="store_true", help="never overwrite a file")
        self._parser.add_argument("--make-parents", action="store_true", help="create missing directories")

    def _run(self, args: argparse.Namespace) -> None:
        source = find_recipe(args.file) or find_config(args.file)
        if source is None:
            hint = "."
            suggestion = suggest_configs(args.file)
            if suggestion:
                hint = f": {suggestion}"
            self._parser.error(
                f"Invalid file name: {args.file}. Try `tune ls` to see all available files to copy{hint}"
            )
        destination = destination_of(source, args.destination)
        if args.no_clobber and destination.exists():
            print(f"File already exists at {destination.absolute()}, not overwriting.")
            return
        if not destination.parent.is_dir() and not args.make_parents:
            self._parser.error(
                f"Cannot create regular file: '{destination}'. No such file or directory. "
                "To create the directory, add --make-parents."
            )
        content = source.read_bytes()
        if args.overrides:
            if source.suffix != ".yaml":
                self._parser.error(f"{args.file} is a recipe, which has no settings to change: remove key=value.")
            content = changed_text(source, args.overrides).encode()
        backup = back_up(destination, content)
        with atomic_write(destination) as file:
            file.write(content)
        print(f"Copied file to {destination}")
        if backup is not None:
            print(f"The previous file is kept as {backup}")


class Cat(Subcommand):
    """Subcommand that prints a config."""

    name = "cat"
    help = "Print a config"
    description = "Print a config: as it is, with key=value changed, or with its keys sorted."
    epilog = """
        examples:
          $ tune cat llama3_2/1B_lora_single_device
          recipe: lora_finetune_single_device
          output_dir: /tmp/torchtune/llama3_2_1B/lora_single_device
          ...
          $ tune cat --sort my_config.yaml
          $ tune cat any_lora model=HuggingFaceTB/SmolLM2-135M-Instruct data=chats.jsonl
        To see all configs, run `tune ls`; to change one, copy it with `tune cp`.
    """

    def _add_arguments(self) -> None:
        self._parser.add_argument("config_name", help="name of a config, or path of a YAML file")
        self._parser.add_argument(
            "overrides", nargs="*", default=[], help="key=value: settings of the config to change"
        )
        self._parser.add_argument("--sort", action="store_true", help="print the keys in alphabetical order")

    def _run(self, args: argparse.Namespace) -> None:
        import yaml

        from torchtune.config import ConfigError, apply_overrides, read_document

        name = args.config_name
        path = find_config(name)
        if path is None:
            if find_recipe(name) is not None:
                print(f"'{name}' is a recipe, not a config. Please use a config name.")
                return
            path = Path(name)
            if path.suffix.lower() not in (".yaml", ".yml"):
                self._parser.error(
                    f"Invalid config format: '{name}'. Must be YAML (.yaml/.yml), or a name of `tune ls`: "
                    + (suggest_configs(name) or "`tune ls --all` shows all.")
                )
            if not path.is_file():
                self._parser.error(f"Config '{name}' not found.")
        overrides = expand_shorthands(path, args.overrides)
        try:
            document = read_document(path)
            # A file that is printed as it is may have mistakes such as a key that is given twice.
            if args.sort or overrides:
                document.check()
        except ConfigError as error:
            self._parser.error(f"Error parsing YAML file: {error.errors[0]}")
        text = path.read_text(encoding="utf-8-sig")
        if overrides:
            text = changed_text(path, overrides)
            apply_overrides(document, overrides)
        if args.sort and document.data:
            text = yaml.safe_dump(document.data, sort_keys=True, allow_unicode=True, indent=4, width=80)
        if document.data or document.mistakes:  # otherwise there is no setting to print
            print(text, end="" if text.endswith("\n") else "\n")
