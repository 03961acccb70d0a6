"""Tables that are made of the code when the documentation is built, so that they are always current.

- ``features-table``: features × recipes, from ``recipes/features.yaml`` and the recipes' settings.
- ``models-table``: every builder of every family with its size, counted on the meta device.
"""

import ast
import importlib
import inspect
from pathlib import Path
from typing import Any

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


def builders_of(family: str) -> dict[str, object]:
    """The builders of a family that need no argument: name -> function."""
    module = importlib.import_module(f"torchtune.models.{family}")
    found = {}
    for name in getattr(module, "__all__", ()):
        value = getattr(module, name)
        if not inspect.isfunction(value) or inspect.signature(value).return_annotation is inspect.Signature.empty:
            continue
        if name.startswith(("lora_", "qlora_")) or "tokenizer" in name:
            continue
        if all(p.default is not p.empty for p in inspect.signature(value).parameters.values()):
            found[name] = value
    return found


class ModelsTable(_Table):
    """Builders with what they build; the parameters are counted on the meta device."""

    def run(self) -> list[nodes.Node]:
        import torch

        from torchtune import models
        from torchtune.modules import TransformerDecoder

        found = []
        for family in models.__all__:
            rows = []
            for name, builder in builders_of(family).items() if inspect.ismodule(getattr(models, family)) else ():
                with torch.device("meta"):
                    model = builder()
                if isinstance(model, TransformerDecoder):
                    rows.append((sum(parameter.numel() for parameter in model.parameters()), family, name, model))
            if rows:
                found.append(nodes.rubric(text=f"torchtune.models.{family}"))
                found += self.table(HEAD, [_row(*row) for row in sorted(rows, key=lambda row: row[0])])
        return found


HEAD = ["builder", "parameters", "layers", "width", "vocabulary", "context", "with adapters"]


def _row(count: int, family: str, name: str, model: Any) -> list[str]:
    description = model.description
    path = f"torchtune.models.{family}"
    lora = hasattr(importlib.import_module(path), f"lora_{name}")
    return [
        f":func:`{name} <{path}.{name}>`",
        f"{count:,}",
        str(description.num_layers),
        f"{description.embed_dim:,}",
        f"{description.vocab_size:,}",
        f"{description.max_seq_len:,}",
        f":func:`lora_{name} <{path}.lora_{name}>`" if lora else "by conversion",
    ]


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("features-table", FeaturesTable)
    app.add_directive("models-table", ModelsTable)
    return {"parallel_read_safe": True}
