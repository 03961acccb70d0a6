"""Check whether a config belongs to the recipe that runs it."""

from collections.abc import Collection, Mapping
from typing import Any


def recipe_name_of(data: Mapping[str, Any], scope: Mapping[str, Any]) -> Any:
    """Return the config's ``recipe:``, or the name of the running shipped recipe if the config has no such key."""
    from torchtune._recipe_registry import recipe_at

    return data["recipe"] if "recipe" in data else recipe_at(scope.get("__file__") or "")


def is_setting(key: str) -> bool:
    """Return whether a shipped recipe has a setting of this name."""
    from torchtune._recipe_registry import get_all_recipes, settings_of_recipe

    return any(key in settings_of_recipe(recipe) for recipe in get_all_recipes())


def is_other_method(data: Mapping[str, Any], scope: Mapping[str, Any]) -> bool:
    """Return whether the config names a recipe of another training method than the shipped recipe that runs it."""
    from torchtune._recipe_registry import are_other_methods, recipe_at

    own, named = recipe_at(scope.get("__file__") or ""), data.get("recipe")
    return own is not None and isinstance(named, str) and are_other_methods(own, named)


def explain_wrong_recipe(
    data: Mapping[str, Any], scope: Mapping[str, Any], own_settings: Collection[str]
) -> str | None:
    """Return a sentence that names the right recipe if the config is for another recipe, otherwise ``None``.

    A shipped recipe compares the config's ``recipe:`` with its own name. Otherwise the keys decide: if this recipe
    lacks some keys, the sentence names shipped recipes that have all of them, preferably with the same method.

    Args:
        data: the config.
        scope: globals of the recipe.
        own_settings: names of the recipe's settings.
    """
    from torchtune._recipe_registry import current_name, get_all_recipes, recipe_at, settings_of_recipe

    own, named = recipe_at(scope.get("__file__") or ""), data.get("recipe")
    named = current_name(named) if isinstance(named, str) else named
    shipped = {recipe.name: recipe for recipe in get_all_recipes()}
    if own is not None and named in shipped:
        if named == own:
            return None
        return f"The config is for the recipe {named}, and this is {own}: `tune run --config` alone runs the right one."
    keys = {key for key in data if key != "recipe"}
    if keys <= set(own_settings):
        return None
    fitting = [name for name, recipe in shipped.items() if keys <= settings_of_recipe(recipe)]
    if own is not None:  # prefer the same method for another number of devices
        fitting = [name for name in fitting if shipped[name].method == shipped[own].method] or fitting
    if not fitting:
        return None
    return (
        f"The config fits the recipe {' or '.join(fitting)}: name it after `tune run`, or in the config as `recipe:`."
    )
