"""Find configs by words, as ``tune ls qwen3 8B lora`` does, and the nearest to a name that is none."""

import re
from collections import Counter
from collections.abc import Iterable

from torchtune._recipe_registry import Config, Recipe, get_all_recipes
from torchtune.config._errors import did_you_mean

# Words of a recipe's name that its configs say themselves, and say better: QLoRA is trained by a recipe for LoRA.
_SAID_BY_CONFIGS = {"full", "lora", "single", "device", "distributed"}


def device_of(config: Config, recipe: Recipe) -> str:
    """``single_device`` or ``distributed``."""
    alone = "single_device" in config.name or "low_memory" in config.name or not recipe.supports_distributed
    return "single_device" if alone else "distributed"


def families() -> dict[str, int]:
    """Family -> number of its configs."""
    named = Counter(config.family for config, _ in _pairs())
    return {family: named[family] for family in sorted(named) if family}


def find(words: Iterable[str]) -> list[tuple[Config, Recipe]]:
    """The configs that all words describe: a family, a size, a method, a device, or the name of a recipe."""
    known = {name for recipe in get_all_recipes() for name in _names(recipe)}
    wanted = [part for word in words for part in ([word] if word in known else word.lower().split("/")) if part]
    pairs = _pairs()
    for word in wanted:
        family = re.sub(r"[.-]", "_", word)
        # "qwen" is all families of Qwen, "qwen3" is one
        prefix = f"{family}/" if family in families() else family
        pairs = [pair for pair in pairs if pair[0].name.startswith(prefix) or _describes(word, *pair)]
    return pairs


def vocabulary() -> set[str]:
    """Words that describe some config."""
    return {*families(), "single_device", *(word for pair in _pairs() for word in _text(*pair).split("_") if word)}


def nearest_to(name: str) -> str:
    """What to say of a name that is no config: the one that was mistyped, or the nearest of its family, or nothing."""
    family, _, rest = name.rpartition("/")
    words = set(rest.lower().split("_"))
    names = [config.name for config, _ in _pairs()]

    def rank(other: str) -> tuple[int, int]:
        others = set(other.rpartition("/")[2].lower().split("_"))
        # a size counts more than a method
        return -sum(1 + word[0].isdigit() for word in words & others), len(others - words)

    same = [other for other in names if other.startswith(f"{family}/")]
    if same and words <= vocabulary():
        nearest = ", ".join(map(repr, sorted(same, key=rank)[:3]))
        return f"nearest are {nearest}; with overrides they run any model and method (docs/configs.rst)."
    return did_you_mean(name, names).removeprefix("; ")


def _pairs() -> list[tuple[Config, Recipe]]:
    """Every config with its recipe."""
    return [(config, recipe) for recipe in get_all_recipes() for config in recipe.configs]


def _names(recipe: Recipe) -> list[str]:
    return [recipe.name, *recipe.former_names]


def _text(config: Config, recipe: Recipe) -> str:
    """The words of a config's method, size and device, each between underscores."""
    of_recipe = [word for word in recipe.name.split("_") if word not in _SAID_BY_CONFIGS]
    stem = config.name.rpartition("/")[2]
    return "_".join(["", stem, *of_recipe, device_of(config, recipe), ""]).lower()


def _describes(word: str, config: Config, recipe: Recipe) -> bool:
    return f"_{word}_" in _text(config, recipe) or word in _names(recipe)
