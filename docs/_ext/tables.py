"""Tables that are generated from the code when the documentation is built.

- ``recipes-table``: every recipe of ``recipes/features.yaml``, with its groups and the first sentence of its file.
- ``features-table``: features × training recipes, from ``recipes/features.yaml`` and the recipes' settings.
- ``levers-table``: peak memory by lever, from ``docs/tables/levers.yaml``.
"""

import ast
from pathlib import Path

import yaml
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from tools.composition_table import list_table
from tools.recipe_table import TABLE, groups, recipe_files, recipes_in, table


class _Table(SphinxDirective):
    """Renders rows of reStructuredText as a ``list-table``."""

    def table(self, head: list[str], rows: list[list[str]]) -> list[nodes.Node]:
        """Return the nodes of a table."""
        node = nodes.container()
        self.state.nested_parse(StringList(list_table([head, *rows]), source="table"), 0, node)
        return node.children


def settings_of(recipe: Path) -> set[str]:
    """Return the names of a recipe's settings."""
    tree = ast.parse(recipe.read_text(encoding="utf-8"))
    (settings,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Settings")
    return {node.target.id for node in settings.body if isinstance(node, ast.AnnAssign)}


class RecipesTable(_Table):
    """Table of the recipes with their groups and purposes."""

    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(str(TABLE))
        files = recipe_files()
        rows = []
        for name, groups_of_recipe in groups().items():
            self.env.note_dependency(str(files[name]))
            docstring = ast.get_docstring(ast.parse(files[name].read_text(encoding="utf-8")))
            purpose = docstring.splitlines()[0].rstrip(".")
            rows.append([f"``{name}``", ", ".join(groups_of_recipe).replace("_", " "), purpose])
        return self.table(["recipe", "groups", "what it does"], rows)


class FeaturesTable(_Table):
    """Table of features by training recipe."""

    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(str(TABLE))
        content = table()
        recipes = recipes_in("training")
        files = recipe_files()
        settings = {name: settings_of(files[name]) for name in recipes}
        rows = []
        for feature, setting in content["features"].items():
            row = [feature, f"``{setting}``"]
            for name in recipes:
                if setting in settings[name]:
                    row.append("yes")
                else:
                    row.append(f"no: {content['reasons'][name][feature]}")
            rows.append(row)
        return self.table(["feature", "setting", *(f"``{name}``" for name in recipes)], rows)


class LeversTable(_Table):
    """Table of the numbers in the picture of memory."""

    def run(self) -> list[nodes.Node]:
        path = Path(__file__).parents[1] / "tables" / "levers.yaml"
        self.env.note_dependency(str(path))
        levers = yaml.safe_load(path.read_text())
        rows = []
        for lever in levers:
            row = ["\\" + lever["label"]]  # escaped, because a label may begin with the "+" of a list
            row += [f"{size:.2f}" for size in lever["gib"].values()]
            row.append(f"{sum(lever['gib'].values()):.1f}")
            rows.append(row)
        return self.table(["GiB", *levers[0]["gib"], "peak"], rows)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives (Sphinx entry point)."""
    app.add_directive("recipes-table", RecipesTable)
    app.add_directive("features-table", FeaturesTable)
    app.add_directive("levers-table", LeversTable)
    return {"parallel_read_safe": True}
