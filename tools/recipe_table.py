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
    """The whole table."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def recipe_files(folder: Path = RECIPES) -> dict[str, Path]:
    """Every recipe file by the name of its recipe; files in subfolders are ``folder/name``."""
    paths = (path for path in sorted(folder.rglob("*.py")) if path.name != "__init__.py")
    found = {path.relative_to(folder).with_suffix("").as_posix(): path for path in paths}
    return {
        name: path for name, path in found.items() if path.name != "__init__.py" and not name.startswith("configs/")
    }


def groups(folder: Path = RECIPES) -> dict[str, list[str]]:
    """The groups of every recipe, in the order of the table.

    Raises:
        RecipeTableError: a recipe file is not declared, a declared one is not there, or a group is unknown.
    """
    path = folder / "features.yaml"
    content, lines = table(path), path.read_text(encoding="utf-8").splitlines()
    declared, known, files = content["recipes"], content["groups"], recipe_files(folder)

    def line(text: str) -> int:
        return next((i for i, found in enumerate(lines, 1) if found.startswith(text)), 1)

    for name in files:
        if name not in declared:
            raise RecipeTableError(
                f"recipes/features.yaml:{line('recipes:')}: recipes/{name}.py belongs to no group: add a line "
                f"'{name}: [...]' under 'recipes:', with some of {', '.join(known)}."
            )
    for name, of_recipe in declared.items():
        where = f"recipes/features.yaml:{line(f'  {name}:')}"
        if name not in files:
            raise RecipeTableError(f"{where}: there is no recipes/{name}.py: remove the line, or name the file so.")
        if not of_recipe:
            raise RecipeTableError(f"{where}: {name} belongs to no group: name some of {', '.join(known)}.")
        for group in of_recipe:
            if group not in known:
                raise RecipeTableError(f"{where}: '{group}' is not a group: use {', '.join(known)}, or describe it.")
    return declared


def recipes_in(*wanted: str, folder: Path = RECIPES) -> list[str]:
    """Names of the recipes that belong to all of these groups, in the order of the table; :func:`groups` checks it."""
    content = table(folder / "features.yaml")
    if unknown := set(wanted) - set(content["groups"]):
        raise RecipeTableError(f"recipes/features.yaml describes no group {', '.join(sorted(unknown))}.")
    return [name for name, found in content["recipes"].items() if set(wanted) <= set(found)]
