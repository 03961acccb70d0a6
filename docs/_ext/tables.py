"""Tables that are made of the code when the documentation is built, so that they are always current.

- ``features-table``: features × recipes, from ``recipes/features.yaml`` and the recipes' settings.
"""

import ast
from pathlib import Path

import yaml
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

RECIPES = Path(__file__).parents[2] / "recipes"


class _Table(SphinxDirective):
    """Renders rows of reStructuredText as a ``list-table``."""

    def table(self, head: list[str], rows: list[list[str]]) -> list[nodes.Node]:
        lines = [".. list-table::", "   :header-rows: 1", ""]
        for row in [head, *rows]:
            lines += [f"   {'*' if i == 0 else ' '} - {cell}" for i, cell in enumerate(row)]
        node = nodes.container()
        self.state.nested_parse(StringList(lines, source="table"), 0, node)
        return node.children


def settings_of(recipe: Path) -> set[str]:
    """Names of the settings that a recipe declares."""
    tree = ast.parse(recipe.read_text(encoding="utf-8"))
    (settings,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Settings"]
    return {node.target.id for node in settings.body if isinstance(node, ast.AnnAssign)}


class FeaturesTable(_Table):
    """Features × training recipes."""

    def run(self) -> list[nodes.Node]:
        table = yaml.safe_load((RECIPES / "features.yaml").read_text(encoding="utf-8"))
        self.env.note_dependency(str(RECIPES / "features.yaml"))
        recipes = sorted(path for path in RECIPES.glob("*finetune*.py"))
        rows = []
        for feature, setting in table["features"].items():
            cells = [
                "yes" if setting in settings_of(recipe) else f"no: {table['reasons'][recipe.stem][feature]}"
                for recipe in recipes
            ]
            rows.append([feature, f"``{setting}``", *cells])
        return self.table(["feature", "setting", *(f"``{recipe.stem}``" for recipe in recipes)], rows)


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("features-table", FeaturesTable)
    return {"parallel_read_safe": True}
