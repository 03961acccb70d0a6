"""Read ``recipes/features.yaml``: which groups each recipe belongs to, and which features it has.

Tests and the documentation take their lists of recipes from here, never from the name of a file.
"""

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "recipes"
TABLE = RECIPES / "features.yaml"


class RecipeTableError(Exception):
    """The table and the files do not agree; the message names the file and line to edit."""


def table(path: Path = TABLE) -> dict[str, Any]:
    """Return the whole table."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def recipe_files(folder: Path = RECIPES) -> dict[str, Path]:
    """Return every recipe file by the name of its recipe; files in subfolders are ``folder/name``."""
    files = {}
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).with_suffix("").as_posix()
        if path.name != "__init__.py" and not name.startswith("configs/"):
            files[name] = path
    return files


def groups(folder: Path = RECIPES) -> dict[str, list[str]]:
    """Return the groups of every recipe, in the order of the table.

    Raises:
        RecipeTableError: a recipe file is not declared, a declared one is not there, or a group is unknown.
    """
    path = folder / "features.yaml"
    content = table(path)
    declared = content["recipes"]
    group_names = ", ".join(content["groups"])
    lines = path.read_text(encoding="utf-8").splitlines()

    def position_of(start: str) -> str:
        """Return file and number of the first line that starts with a text."""
        for number, line in enumerate(lines, start=1):
            if line.startswith(start):
                return f"recipes/features.yaml:{number}"
        return "recipes/features.yaml:1"

    files = recipe_files(folder)
    for name in files:
        if name not in declared:
            raise RecipeTableError(
                f"{position_of('recipes:')}: recipes/{name}.py belongs to no group: add a line '{name}: [...]' under "
                f"'recipes:', with some of {group_names}."
            )
    for name, groups_of_recipe in declared.items():
        position = position_of(f"  {name}:")
        if name not in files:
            raise RecipeTableError(f"{position}: there is no recipes/{name}.py: remove the line, or name the file so.")
        if not groups_of_recipe:
            raise RecipeTableError(f"{position}: {name} belongs to no group: name some of {group_names}.")
        for group in groups_of_recipe:
            if group not in content["groups"]:
                raise RecipeTableError(f"{position}: '{group}' is not a group: use {group_names}, or describe it.")
    return declared


def recipes_in(*wanted: str, folder: Path = RECIPES) -> list[str]:
    """Return the recipes that belong to all of these groups, in the order of the table; :func:`groups` checks it."""
    content = table(folder / "features.yaml")
    unknown = set(wanted) - set(content["groups"])
    if unknown:
        raise RecipeTableError(f"recipes/features.yaml describes no group {', '.join(sorted(unknown))}.")
    return [name for name, groups_of_recipe in content["recipes"].items() if set(wanted) <= set(groups_of_recipe)]
