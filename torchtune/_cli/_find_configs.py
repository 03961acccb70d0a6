"""Find configs by words, as in ``tune ls qwen3 8B lora``, and suggest similar names."""

import re
from collections import Counter
from collections.abc import Iterable

from torchtune._recipe_registry import Config, Recipe, get_all_recipes
from torchtune.config import did_you_mean

# Words of recipe names that do not describe their configs: a LoRA recipe also trains QLoRA.
_IGNORED_RECIPE_WORDS = {"full", "lora", "single", "device", "distributed"}


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
