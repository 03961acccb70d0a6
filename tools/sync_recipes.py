"""Copy shared methods and blocks of settings between recipes (``make sync``).

A method under ``# twin of GROUP``, and a paragraph of settings under ``# twin of GROUP: NAME``, has the same text in
every recipe of the group that has it. It is written in the first of them in the order of ``recipes/features.yaml``:
edit it there. ``recipes/features.yaml`` also says which recipes a group consists of.
"""

import re
import sys
from pathlib import Path

from recipe_table import RECIPES, RecipeTableError, groups, recipe_files

HEAD = r"    # twin of (?P<group>\w+)"
METHOD = HEAD + r"\n(?:    @[^\n]*\n)*    def (?P<name>\w+)\((?:.|\n)*?(?=\n\n    (?:#|@|def)|\n\n\n|\Z)"
BLOCK = HEAD + r": (?P<name>\w+)\n(?:[^\n]+\n)+?(?=\n)"
TWIN = {"method": re.compile(METHOD), "settings": re.compile(BLOCK)}


def twins(text: str) -> dict[tuple[str, str, str], str]:
    """(kind, group, name) -> text, for every twin that a recipe marks."""
    return {
        (kind, match["group"], match["name"]): match[0] for kind, form in TWIN.items() for match in form.finditer(text)
    }


def synced(folder: Path = RECIPES) -> dict[Path, str]:
    """The text that each recipe should have.

    Raises:
        RecipeTableError: a recipe is not in the table, or marks a twin of a group that it does not belong to.
    """
    of_recipe, files = groups(folder), recipe_files(folder)
    written: dict[tuple[str, str, str], str] = {}
    texts = {}
    for name, found in of_recipe.items():
        text = files[name].read_text(encoding="utf-8")
        for (kind, group, twin), body in twins(text).items():
            if group not in found:
                line = text[: text.index(body)].count("\n") + 1
                raise RecipeTableError(
                    f"recipes/{name}.py:{line}: '{twin}' is a twin of {group}, a group that recipes/features.yaml does "
                    f"not give {name}: add the group there, or change the comment."
                )
            written.setdefault((kind, group, twin), body)
        for kind, form in TWIN.items():
            text = form.sub(lambda match, kind=kind: written[kind, match["group"], match["name"]], text)
        texts[files[name]] = text
    return texts


def main() -> int:
    """Rewrite every recipe in which a twin differs from the first one's."""
    try:
        texts = synced()
    except RecipeTableError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for path, text in texts.items():
        if path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"synced {path.relative_to(RECIPES)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
