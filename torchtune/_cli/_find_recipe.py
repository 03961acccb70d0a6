"""Find recipes and configs by name, by path, or by words as in ``tune ls qwen3 8B lora``."""

import importlib
import importlib.util
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
        UserError: there is no such recipe.
    """
    name = current_name(name)
    path = find_recipe(name)
    if path is None:
        own = next((p for p in (Path(name), Path(f"{name}.py")) if p.is_file()), None)
        path = own.resolve() if own else None
    add_to_path(os.getcwd())
    if path is not None:
        return RecipeTarget(name, path=path)
    parts = name.split(".")
    if "/" not in name and all(part.isidentifier() for part in parts) and not name.endswith(".py"):
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            found = None
        if found is not None and len(parts) > 1:
            return RecipeTarget(name, module=name)
    hint = did_you_mean(name, (recipe.name for recipe in get_all_recipes())).removeprefix("; ")
    hint = hint or "`tune ls` shows all recipes; give the path of your own recipe."
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


def recipe_named_by(config: Path) -> RecipeTarget:
    """Find the recipe that ``config`` names in its key ``recipe:``.

    Raises:
        UserError: the config has no key ``recipe:``.
    """
    name = recipe_of(config)
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
    return (recipe_named_by(path) if recipe is None else resolve_recipe(recipe)), path


def find_checkpoint(model: str) -> str:
    """Return the best or last checkpoint if ``model`` is the output folder of a run; otherwise return ``model``.

    Raises:
        UserError: there is no such folder, or the run has no complete checkpoint.
    """
    from torchtune.reports import SETTINGS, RunFolder

    folder = Path(model).expanduser()
    if not folder.exists() and folder.is_absolute():  # otherwise it may be a repository on the hub
        raise UserError(f"{folder}: there is no such folder: give the folder of a model, a checkpoint or a run.")
    if not (folder / SETTINGS).is_file() or any(folder.glob("*config.json")):  # a checkpoint also has the settings
        return model
    found, words = RunFolder(folder).checkpoint()
    print(f"model       {found}, {words}", file=sys.stderr)
    return str(found)


def add_to_path(folder: str) -> None:
    """Append ``folder`` to the import path."""
    if folder not in sys.path:
        sys.path.append(folder)


def device_of(config: Config, recipe: Recipe) -> str:
    """Return ``single_device`` or ``distributed``."""
    alone = "single_device" in config.name or "low_memory" in config.name or not recipe.supports_distributed
    return "single_device" if alone else "distributed"


def families() -> dict[str, int]:
    """Return model family -> number of its configs."""
    named = Counter(config.family for config, _ in _all_configs())
    return {family: named[family] for family in sorted(named) if family}


def find_configs(words: Iterable[str]) -> list[tuple[Config, Recipe]]:
    """Return the configs that match all words: a family, a size, a method, a device, or a recipe's name."""
    known = {name for recipe in get_all_recipes() for name in _recipe_names(recipe)}
    wanted = [part for word in words for part in ([word] if word in known else word.lower().split("/")) if part]
    pairs = _all_configs()
    for word in wanted:
        family = re.sub(r"[.-]", "_", word)
        # "qwen" matches all Qwen families, "qwen3" only one
        prefix = f"{family}/" if family in families() else family
        pairs = [pair for pair in pairs if pair[0].name.startswith(prefix) or _matches_word(word, *pair)]
    return pairs


def search_words() -> set[str]:
    """Return all words that match at least one config."""
    words = (word for pair in _all_configs() for word in _words(*pair).split("_") if word)
    return {*families(), "single_device", *words}


def suggest_configs(name: str) -> str:
    """Return a hint for an unknown config name: the closest names of its family, a corrected spelling, or ""."""
    family, _, rest = name.rpartition("/")
    words = set(rest.lower().split("_"))
    names = [config.name for config, _ in _all_configs()]

    def rank(other: str) -> tuple[int, int]:
        others = set(other.rpartition("/")[2].lower().split("_"))
        # a size counts more than a method
        return -sum(1 + word[0].isdigit() for word in words & others), len(others - words)

    same = [other for other in names if other.startswith(f"{family}/")]
    if same and words <= search_words():
        nearest = ", ".join(map(repr, sorted(same, key=rank)[:3]))
        return f"nearest are {nearest}; with overrides they run any model and method (docs/configs.rst)."
    return did_you_mean(name, names).removeprefix("; ")


def _all_configs() -> list[tuple[Config, Recipe]]:
    return [(config, recipe) for recipe in get_all_recipes() for config in recipe.configs]


def _recipe_names(recipe: Recipe) -> list[str]:
    return [recipe.name, *recipe.former_names]


def _words(config: Config, recipe: Recipe) -> str:
    """Return the words of a config's method, size and device, with underscores around and between them."""
    of_recipe = [word for word in recipe.name.split("_") if word not in _IGNORED_RECIPE_WORDS]
    stem = config.name.rpartition("/")[2]
    return "_".join(["", stem, *of_recipe, device_of(config, recipe), ""]).lower()


def _matches_word(word: str, config: Config, recipe: Recipe) -> bool:
    return f"_{word}_" in _words(config, recipe) or word in _recipe_names(recipe)
