"""Recipes and configs by name: the shipped ones, the user's own files, and the search by words of ``tune ls``.

The registry is derived from the files: adding a file adds an entry. A recipe is a ``.py`` file of the package
``recipes``, next to ``torchtune``. A config is a ``.yaml`` file under ``recipes/configs``; its first key, ``recipe:``,
names its recipe.
"""

import ast
import functools
import importlib
import importlib.util
import itertools
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torchtune._config_templates import (
    config_on_demand,
    configs_on_demand,
    impossible_configs,
    parse_yaml,
    reason_without_config,
    recipe_of_method,
    settings_fields,
    usual_methods,
)
from torchtune.config import did_you_mean
from torchtune.utils import UserError

ROOT = Path(__file__).resolve().parents[1] / "recipes"
CONFIGS = ROOT / "configs"
# Folders of the package without recipes.
_NOT_RECIPES = frozenset({"configs", "__pycache__"})
_LARGEST = 2**20  # maximum characters of a config
_RECIPE_KEY = re.compile(r"^recipe:[ \t]*[\"']?([\w./-]+)[\"']?[ \t]*(?:#.*)?$", re.MULTILINE)

# usual: files, and some two methods of each other model; on_demand: the others that are made when they are named;
# impossible: models and methods that do not go together.
ConfigKind = Literal["usual", "on_demand", "impossible"]
# Words of recipe names that do not describe their configs: a LoRA recipe also trains QLoRA.
_IGNORED_RECIPE_WORDS = {"full", "lora", "single", "device", "distributed"}


@dataclass
class Config:
    """A shipped config: its name and its file, relative to ``recipes/configs``."""

    name: str
    file_path: str

    @property
    def path(self) -> Path:
        """Absolute path of the file."""
        return CONFIGS / self.file_path

    @property
    def family(self) -> str:
        """Model family, the folder of the config; empty for a config outside a folder."""
        return self.name.rpartition("/")[0]

    @property
    def order(self) -> list[tuple[bool, float, str]]:
        """Key for natural sorting: ``135M`` before ``0.5B`` before ``3B`` before ``14B``."""
        in_billions = re.sub(r"(\d+)M(?=_)", lambda match: f"{int(match[1]) / 1000}B", self.name)
        key = []
        for part in re.split(r"(\d+(?:\.\d+)?)", in_billions):
            if part[:1].isdigit():
                key.append((False, float(part), ""))
            else:
                key.append((True, 0.0, part))
        return key


@dataclass
class Recipe:
    """A shipped recipe: its name, its file, relative to ``recipes``, and the configs written for it."""

    name: str
    file_path: str
    configs: list[Config] = field(default_factory=list)

    @property
    def path(self) -> Path:
        """Absolute path of the file."""
        return ROOT / self.file_path

    @property
    def sentence(self) -> str:
        """The first sentence of its docstring."""
        text = self.path.read_text(encoding="utf-8").lstrip().removeprefix('"""')
        return " ".join(re.split(r"\.\s|\"\"\"", text, maxsplit=1)[0].split())

    @property
    def former_names(self) -> list[str]:
        """Names of the recipe in earlier releases."""
        return [former for former, name in _FORMER.items() if name == self.name]

    @property
    def groups(self) -> frozenset[str]:
        """Features of the recipe in ``recipes/features.yaml``; empty if it has no entry."""
        return _groups_by_recipe().get(self.name, frozenset())

    @property
    def supports_distributed(self) -> bool:
        """Whether the recipe runs with several processes."""
        return "distributed" in self.groups

    @property
    def method(self) -> frozenset[str]:
        """Features of the training method, without the number of devices."""
        return self.groups - {"one_device", "distributed"}


def recipe_of(config: str | Path) -> str | None:
    """Return the recipe that a config file names in its ``recipe:`` key, or ``None``."""
    try:
        with open(config, encoding="utf-8-sig", errors="replace") as file:
            match = _RECIPE_KEY.search(file.read(_LARGEST))
    except OSError as error:
        raise UserError(f"{config}: it cannot be read: {error.strerror}.") from error
    return None if match is None else match[1]


@functools.cache
def _groups_by_recipe() -> dict[str, frozenset[str]]:
    """Return the table of ``recipes/features.yaml``: the name of each recipe, and its features."""
    content = parse_yaml((ROOT / "features.yaml").read_text(encoding="utf-8"))
    return {name: frozenset(groups) for name, groups in content["recipes"].items()}


@functools.cache
def _scan() -> tuple[Recipe, ...]:
    """Return all recipes with their configs, from the files; cached, because there are hundreds.

    Configs that name no recipe, or one that is not there, are left out.
    """
    recipes = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).parts
        if path.name != "__init__.py" and not _NOT_RECIPES.intersection(parts):
            file_path = "/".join(parts)
            name = file_path.removesuffix(".py")
            recipes[name] = Recipe(name, file_path)
    for path in CONFIGS.rglob("*.yaml"):
        file_path = path.relative_to(CONFIGS).as_posix()
        recipe_name = recipe_of(path)
        if recipe_name is None:
            continue
        recipe = recipes.get(current_name(recipe_name))
        if recipe is not None:
            recipe.configs.append(Config(file_path.removesuffix(".yaml"), file_path))
    for recipe in recipes.values():
        recipe.configs.sort(key=lambda config: config.order)
    return tuple(sorted(recipes.values(), key=lambda recipe: (recipe.name.startswith("dev/"), recipe.name)))


def get_all_recipes() -> list[Recipe]:
    """Return all recipes with their configs, sorted by name, with ``dev/`` last."""
    return list(_scan())


# Name in earlier releases -> current name.
_FORMER = {
    "qat_single_device": "full_finetune_single_device",
    "qat_distributed": "full_finetune_distributed",
    "qat_lora_finetune_single_device": "lora_finetune_single_device",
    "qat_lora_finetune_distributed": "lora_finetune_distributed",
    "full_dpo_single_device": "dpo",
    "full_dpo_distributed": "dpo",
    "lora_dpo_single_device": "dpo",
    "lora_dpo_distributed": "dpo",
    "full_grpo_single_device": "grpo",
    "full_grpo_distributed": "grpo",
    "lora_grpo_single_device": "grpo",
    "lora_grpo_distributed": "grpo",
    "ppo_full_finetune_single_device": "ppo",
    "knowledge_distillation_single_device": "knowledge_distillation",
    "knowledge_distillation_distributed": "knowledge_distillation",
    "dev/generate_v2": "generate",
    "dev/grpo_full_finetune_distributed": "grpo",
}


# (prefix of a name, what a run under this name must have). Several rows can apply.
_PROMISES = (
    ("lora_", "adapters"),
    ("knowledge_", "adapters"),
    ("qat_lora_", "adapters"),
    ("qat_", "quantizer"),
    ("full_", "weights"),
    ("ppo_full_", "weights"),
)


def current_name(name: str) -> str:
    """Return the current name of a recipe."""
    return _FORMER.get(name, name)


def are_other_methods(first: str, second: str) -> bool:
    """Return whether two names, current or former, belong to shipped recipes with different training methods."""
    methods = {recipe.name: recipe.method for recipe in _scan()}
    first_method = methods.get(current_name(first))
    second_method = methods.get(current_name(second))
    return first_method is not None and second_method is not None and first_method != second_method


def promises(name: object) -> frozenset[str]:
    """Return the features that a recipe name promises: ``"adapters"``, ``"weights"``, or the setting ``"quantizer"``.

    A run under a former name must not do anything else.
    """
    if not isinstance(name, str):
        return frozenset()
    # Of the current names, only lora_finetune_* promises something: other recipes train whatever the model has.
    if name not in _FORMER and not name.startswith("lora_finetune"):
        return frozenset()
    return frozenset(promise for prefix, promise in _PROMISES if name.startswith(prefix))


def find_recipe(name: str) -> Path | None:
    """Return the file of the recipe with this current or former name, or ``None``."""
    name = current_name(name)
    for recipe in _scan():
        if recipe.name == name:
            return recipe.path
    return None


def recipe_at(path: str | Path) -> str | None:
    """Return the name of the shipped recipe in this file, or ``None``."""
    file = Path(path).resolve()
    for recipe in _scan():
        if recipe.path == file:
            return recipe.name
    return None


def settings_of_recipe(recipe: Recipe) -> dict[str, str]:
    """Return the defaults of a recipe's settings by name, as written in its source, which is not imported.

    A setting without a default has the text ``"None"``.
    """
    return _settings_in(recipe.path)


@functools.cache  # checks ask for all recipes, once per setting
def _settings_in(path: Path) -> dict[str, str]:
    defaults = {}
    for name, default in settings_fields(path).items():
        defaults[name] = "None" if default is None else ast.unparse(default)
    return defaults


def find_config(name: str, recipe: str | None = None) -> Path | None:
    """Return the file of the config called ``name``, preferably one of ``recipe``, or ``None``.

    A config of a model and a method that is not shipped as a file is made on demand.
    """
    preferred = None if recipe is None else current_name(recipe)
    # A config of the preferred recipe comes first; sorting keeps the order of the others.
    candidates = sorted(_scan(), key=lambda candidate: candidate.name != preferred)
    for candidate in candidates:
        for config in candidate.configs:
            if config.name == name:
                return config.path
    return config_on_demand(name)


def find_config_file(name: str, recipe: str | None = None) -> Path | None:
    """Return the file of the shipped config called ``name``, as :func:`find_config`, or the file at this path, if any.

    Commands and recipes find the config of ``--config`` by this function.
    """
    path = Path(name)
    if path.suffix.lower() not in (".yaml", ".yml"):  # no shipped config has a name with this suffix
        shipped = find_config(name, recipe)
        if shipped is not None:
            return shipped
    if path.is_file():
        return path
    return None


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
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    if path is not None:
        return RecipeTarget(name, path=path)
    parts = name.split(".")
    # A name that ends with .py is a missing file, not a module called "py" in a package.
    is_module_name = all(part.isidentifier() for part in parts) and not name.endswith(".py")
    # A name without a dot is more likely a mistyped recipe than a top-level module, such as "test".
    if is_module_name and len(parts) > 1:
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError:  # raised if a parent package is missing; for the module itself, the spec is None
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
    path = find_config_file(name, recipe)
    if path is None:
        hint = suggest_configs(name) or "`tune ls --all` shows all configs; give the path of your own config."
        raise UserError(f"there is no config '{name}': {hint}")
    return path


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
        words: the words; without any, all configs of the kind match.
        kind: search the configs of a kind.
    """
    names_of_recipe = {recipe.name: [recipe.name, *recipe.former_names] for recipe in get_all_recipes()}
    search_terms: list[str] = []
    all_recipe_names = set(itertools.chain(*names_of_recipe.values()))
    for word in words:
        if word in all_recipe_names:  # kept whole: a recipe's name may have a folder, such as dev/
            search_terms.append(word)
        else:  # a config's name, such as qwen3/8B_lora, is its family and the words of its stem
            search_terms += [part for part in word.lower().split("/") if part]
    pairs = _configs_of(kind)
    for term in search_terms:
        family = re.sub(r"[.-]", "_", term)  # folders of configs have underscores: qwen2_5 for "qwen2.5"
        prefix = family
        if family in families():  # "qwen3" matches one family, "qwen" all that begin with it
            prefix += "/"
        matches = []
        for config, recipe in pairs:
            is_named = config.name.startswith(prefix) or term in names_of_recipe[recipe.name]
            if is_named or f"_{term}_" in _words(config, recipe):  # whole words; a term may be several, such as 8b_lora
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
    """Return a hint for an unknown config name: why there is none, similar names, a corrected spelling, or ""."""
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
    # If all words are known, their combination is missing: similar spellings would be of no help.
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
