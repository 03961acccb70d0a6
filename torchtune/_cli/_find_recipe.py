"""Find recipes and configs by name, by path, or by words as in ``tune ls qwen3 8B lora``."""

import functools
import importlib
import importlib.util
import itertools
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torchtune._config_templates import (
    configs_on_demand,
    impossible_configs,
    reason_without_config,
    recipe_of_method,
    usual_methods,
)
from torchtune._recipe_registry import (
    Config,
    Recipe,
    current_name,
    find_config,
    find_recipe,
    get_all_recipes,
    recipe_of,
)
from torchtune.config import did_you_mean
from torchtune.utils import UserError

# usual: files, and some two methods of each other model; on_demand: the others that are made when they are named;
# impossible: models and methods that do not go together.
ConfigKind = Literal["usual", "on_demand", "impossible"]
# Words of recipe names that do not describe their configs: a LoRA recipe also trains QLoRA.
_IGNORED_RECIPE_WORDS = {"full", "lora", "single", "device", "distributed"}


@dataclass(frozen=True)
class RecipeTarget:
    """A recipe to run: a file or an importable module."""

    name: str
    path: Path | None = None
    module: str | None = None

    @property
    def registered(self) -> bool:
        """Whether it is a shipped recipe."""
        return self.path is not None and self.path == find_recipe(self.name)

    def load_main(self) -> Callable[..., Any]:
        """Import the recipe without running it and return its ``recipe_main``.

        Raises:
            UserError: the recipe has no function decorated with ``torchtune.config.parse``.
        """
        if self.path is None:
            module = importlib.import_module(self.module)
        else:
            spec = importlib.util.spec_from_file_location(f"_recipe_{self.path.stem}", self.path)
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
        main = getattr(module, "recipe_main", None) or getattr(module, "main", None)
        if main is None:
            raise UserError(
                f"{self.path or self.module}: it has no function recipe_main(cfg) decorated with "
                "torchtune.config.parse: add one, as in a recipe copied with `tune cp`."
            )
        return main


def resolve_recipe(name: str) -> RecipeTarget:
    """Find the recipe called ``name``: a shipped one, a file, or a dotted module (also in the current directory).

    Raises:
        UserError: there is no such recipe, or the file is not a Python file.
    """
    name = current_name(name)
    path = find_recipe(name)
    if path is None:
        for file in (Path(name), Path(f"{name}.py")):
            if os.path.isfile(file):  # False if the name is too long
                path = file.resolve()
                break
    if path is not None and path.suffix != ".py":
        raise UserError(f"{name} is not a recipe, which is a Python file: name a config after --config, rows in data=.")
    # A recipe's module, and the components that its config names, may be in the current directory.
    add_to_path(os.getcwd())
    if path is not None:
        return RecipeTarget(name, path=path)
    parts = name.split(".")
    is_module_name = all(part.isidentifier() for part in parts) and not name.endswith(".py")
    # A name without a dot is more likely a mistyped recipe than a top-level module, such as "test".
    if is_module_name and len(parts) > 1:
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            spec = None
        if spec is not None:
            return RecipeTarget(name, module=name)
    # The hint follows a colon instead of ending a message.
    hint = did_you_mean(name, (recipe.name for recipe in get_all_recipes())).removeprefix("; ")
    if not hint:
        hint = "`tune ls` shows all recipes; give the path of your own recipe."
    raise UserError(f"there is no recipe '{name}': {hint}")


def resolve_config(name: str, recipe: str | None = None) -> Path:
    """Find the config called ``name``: a shipped config, preferably for ``recipe``, or a YAML file.

    Raises:
        UserError: there is no such config.
    """
    path = find_config(name, recipe)
    if path is not None:
        return path
    if Path(name).is_file():
        return Path(name)
    hint = suggest_configs(name) or "`tune ls --all` shows all configs; give the path of your own config."
    raise UserError(f"there is no config '{name}': {hint}")


def recipe_named_by(config: Path, overrides: Iterable[str] = ()) -> RecipeTarget:
    """Find the recipe that ``config`` names in its key ``recipe:``, or an override ``recipe=`` instead.

    Raises:
        UserError: the config has no key ``recipe:``.
    """
    name = recipe_of(config)
    for override in overrides:
        if override.startswith("recipe="):
            name = override.removeprefix("recipe=")
    if name is None:
        from torchtune.config import read_document

        read_document(config)  # raises if it is not valid YAML
        raise UserError(
            f"{config}: it names no recipe: write 'recipe: NAME' as its first line, or the name before --config."
        )
    return resolve_recipe(name)


def find_targets(recipe: str | None, config: str) -> tuple[RecipeTarget, Path]:
    """Find the recipe and the config of a command; if ``recipe`` is None, the recipe is the one named in the config.

    Raises:
        UserError: there is no such recipe or config.
    """
    path = resolve_config(config, recipe)
    if recipe is None:
        return recipe_named_by(path), path
    return resolve_recipe(recipe), path


def find_checkpoint(model: str) -> str:
    """Return the best or last checkpoint if ``model`` is the output folder of a run; otherwise return ``model``.

    Raises:
        UserError: there is no such folder, or the run has no complete checkpoint.
    """
    from torchtune.reports import SETTINGS, RunFolder

    folder = Path(model).expanduser()
    if not folder.exists() and folder.is_absolute():  # otherwise it may be a repository on the hub
        raise UserError(f"{folder}: there is no such folder: give the folder of a model, a checkpoint or a run.")
    # A checkpoint has the settings of its run as well, and the config of its model, which a run's folder lacks.
    is_run = (folder / SETTINGS).is_file() and not any(folder.glob("*config.json"))
    if not is_run:
        return model
    checkpoint, description = RunFolder(folder).checkpoint()
    print(f"model       {checkpoint}, {description}", file=sys.stderr)
    return str(checkpoint)


def add_to_path(folder: str) -> None:
    """Append ``folder`` to the import path."""
    if folder not in sys.path:
        sys.path.append(folder)


def device_of(config: Config, recipe: Recipe) -> str:
    """Return ``single_device`` or ``distributed``."""
    is_named_single = "single_device" in config.name or "low_memory" in config.name
    if is_named_single or not recipe.supports_distributed:
        return "single_device"
    return "distributed"


@functools.cache
def families() -> dict[str, int]:
    """Return model family -> number of its usual configs."""
    counts = Counter(config.family for config, _ in _configs_of("usual"))
    return {family: counts[family] for family in sorted(counts) if family}


def find_configs(words: Iterable[str], kind: ConfigKind = "usual") -> list[tuple[Config, Recipe]]:
    """Return the configs that match all words: a family, a size, a method, a device, or a recipe's name.

    Args:
        words: the words.
        kind: search the configs of a kind.
    """
    names_of_recipe = {recipe.name: [recipe.name, *recipe.former_names] for recipe in get_all_recipes()}
    search_terms: list[str] = []
    all_recipe_names = set(itertools.chain(*names_of_recipe.values()))
    for word in words:
        if word in all_recipe_names:
            search_terms.append(word)
        else:  # a config's name, such as qwen3/8B_lora, is its family and the words of its stem
            search_terms += [part for part in word.lower().split("/") if part]
    pairs = _configs_of(kind)
    for term in search_terms:
        family = re.sub(r"[.-]", "_", term)
        prefix = family
        if family in families():  # "qwen3" matches one family, "qwen" all that begin with it
            prefix += "/"
        matches = []
        for config, recipe in pairs:
            is_named = config.name.startswith(prefix) or term in names_of_recipe[recipe.name]
            if is_named or f"_{term}_" in _words(config, recipe):
                matches.append((config, recipe))
        pairs = matches
    return pairs


def search_words() -> set[str]:
    """Return all words that match at least one config."""
    words = {*families(), "single_device"}
    for config, recipe in _configs_of("usual"):
        words.update(_words(config, recipe).split("_"))
    words.discard("")  # of the underscores at both ends
    return words


def suggest_configs(name: str) -> str:
    """Return a hint for an unknown config name: the closest names of its family, a corrected spelling, or ""."""
    reason = reason_without_config(name)
    if reason is not None:
        return f"{reason}."
    family, _, stem = name.rpartition("/")
    words = set(stem.lower().split("_"))
    names = [config.name for config, _ in _configs_of("usual")]

    def rank(candidate: str) -> tuple[int, int]:
        """Return the sort key of a candidate: first the most shared words, then the fewest additional words."""
        candidate_words = set(candidate.rpartition("/")[2].lower().split("_"))
        # A word that begins with a digit is a size, which counts more than a method.
        shared = sum(1 + word[0].isdigit() for word in words & candidate_words)
        additional = len(candidate_words - words)
        return -shared, additional

    same_family = [candidate for candidate in names if candidate.startswith(f"{family}/")]
    if same_family and words <= search_words():
        nearest = ", ".join(map(repr, sorted(same_family, key=rank)[:3]))
        return f"nearest are {nearest}; with overrides they run any model and method (docs/configs.rst)."
    # The hint follows a colon instead of ending a message.
    return did_you_mean(name, [*names, *configs_on_demand()]).removeprefix("; ")


@functools.cache
def _configs_of(kind: ConfigKind) -> list[tuple[Config, Recipe]]:
    """Return each config of a kind, with its recipe."""
    recipes = {recipe.name: recipe for recipe in get_all_recipes()}
    pairs = []
    if kind == "usual":  # the files, and the usual ones of those that are made when they are named
        for recipe in recipes.values():
            pairs += [(config, recipe) for config in recipe.configs]
    names = impossible_configs() if kind == "impossible" else configs_on_demand()
    for name, (model, method) in names.items():
        is_usual = method in usual_methods(model)
        if kind == "impossible" or is_usual == (kind == "usual"):
            pairs.append((Config(name, f"{name}.yaml"), recipes[recipe_of_method(method)]))
    return pairs


def _words(config: Config, recipe: Recipe) -> str:
    """Return the words of a config's method, size and device, with underscores around and between them."""
    stem = config.name.rpartition("/")[2]
    recipe_words = [word for word in recipe.name.split("_") if word not in _IGNORED_RECIPE_WORDS]
    return "_".join(["", stem, *recipe_words, device_of(config, recipe), ""]).lower()
