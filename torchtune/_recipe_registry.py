"""Registry of shipped recipes and configs, derived from the files: adding a file adds an entry.

A recipe is a ``.py`` file of the package ``recipes``, next to ``torchtune``. A config is a ``.yaml`` file under
``recipes/configs``; its first key, ``recipe:``, names its recipe.
"""

import ast
import functools
import re
from dataclasses import dataclass, field
from pathlib import Path

from torchtune._config_templates import config_on_demand, parse_yaml, settings_fields
from torchtune.utils import UserError

ROOT = Path(__file__).resolve().parents[1] / "recipes"
CONFIGS = ROOT / "configs"
# Folders of the package without recipes.
_NOT_RECIPES = frozenset({"configs", "__pycache__"})
_LARGEST = 2**20  # maximum characters of a config
_RECIPE_KEY = re.compile(r"^recipe:[ \t]*[\"']?([\w./-]+)[\"']?[ \t]*(?:#.*)?$", re.MULTILINE)


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
    """Return all recipes with their configs, from the files; cached, because there are hundreds."""
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
