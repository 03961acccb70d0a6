"""Write recipes/configs from one template per recipe and one table of models (`make configs`).

``--check`` writes nothing and fails if a file differs from what would be written.
"""

import argparse
import ast
import functools
import string
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

SOURCES = Path(__file__).parent / "configs"
RECIPES = Path(__file__).parents[1] / "recipes"
CONFIGS = RECIPES / "configs"


# Settings that everybody changes: configs show them, whatever their value.
ALWAYS_SHOWN = {
    *("batch_size", "gradient_accumulation_steps", "epochs", "dtype", "enable_activation_checkpointing", "compile"),
    *("max_new_tokens", "temperature", "kd_ratio"),
}


class Template(string.Template):
    """``@name`` is filled in; ``$`` belongs to YAML's own references."""

    delimiter = "@"


def common(model: str, row: dict[str, Any]) -> dict[str, str]:
    """What templates read of a model."""
    folder, family = f"/tmp/{row['repo'].rpartition('/')[2]}", model.split("/")[0]
    return {"title": row["title"], "repo": row["repo"], "dir": folder, "family": family, "builder": row["builder"]}


def render(
    recipe: str, name: str, model: str, row: dict[str, Any], tokenizers: dict[str, str], template: str, **values: Any
) -> str:
    """The text of one config."""
    shared = common(model, row)
    # a name is followed by more letters in "@family_tokenizer"
    tokenizer = tokenizers[row["tokenizer"]].replace("@family_tokenizer", f"{shared['family']}_tokenizer")
    filled = textwrap.indent(Template(tokenizer).substitute(shared).rstrip(), "  ")
    text = (SOURCES / f"{template}.yaml").read_text()
    shown = ALWAYS_SHOWN | {row["shows"]} if "shows" in row else ALWAYS_SHOWN
    return without_defaults(Template(text).substitute(shared, name=name, tokenizer=filled, **values), recipe, shown)


@functools.cache
def default_settings(recipe: str) -> dict[str, Any]:
    """Setting -> default, read from the text of the recipe: importing it would load torch."""
    tree = ast.parse((RECIPES / f"{recipe}.py").read_text(encoding="utf-8"))
    (settings,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Settings")
    fields = (node for node in settings.body if isinstance(node, ast.AnnAssign) and node.value is not None)
    constants = (node for node in fields if isinstance(node.value, ast.Constant | ast.UnaryOp))
    return {node.target.id: ast.literal_eval(node.value) for node in constants}


def without_defaults(text: str, recipe: str, shown: set[str]) -> str:
    """The config without the settings that repeat their default, but for those that are ``shown``."""
    defaults = default_settings(recipe)
    values = yaml.safe_load(text)
    repeated = {name for name in defaults.keys() & values.keys() - shown if values[name] == defaults[name]}
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if line.partition(":")[0] not in repeated)


def with_quantized(variants: list[dict[str, Any]], defaults: dict[str, Any]) -> list[dict[str, Any]]:
    """The variants of a row, and for a recipe that has one, the first of them again with a quantised base."""
    quantized = defaults.get("quantized")
    if not variants or quantized is None:
        return variants
    return [*(variant for variant in variants if "only" not in variant), {**variants[0], **quantized}]


def configs() -> Iterator[tuple[str, str]]:
    """(name, text) of every config."""
    table = yaml.load((SOURCES / "models.yaml").read_text(), Loader=yaml.BaseLoader)
    for model, row in table["models"].items():
        for recipe, defaults in table["recipes"].items():
            for changes in with_quantized(row.get(recipe, []), defaults):
                # the loader that keeps numbers as they are written does not merge
                shared = changes.get("<<", {})
                values = {**defaults, **shared, **{key: value for key, value in changes.items() if key != "<<"}}
                name = f"{values.pop('name', model)}_{values.pop('suffix')}"
                if "teacher" in values:
                    teacher = values.pop("teacher")
                    values |= {
                        f"teacher_{key}": value for key, value in common(teacher, table["models"][teacher]).items()
                    }
                yield name, render(recipe, name, model, row, table["tokenizers"], recipe, **values)
    for name, entry in table["single"].items():
        model = entry["model"]
        recipe, template = entry["recipe"], entry.get("template", entry["recipe"])
        yield name, render(recipe, name, model, table["models"][model], table["tokenizers"], template)


def main() -> int:
    """Write or check; returns the number of files that differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if a file is not current")
    check = parser.parse_args().check
    wanted = {CONFIGS / f"{name}.yaml": text for name, text in configs()}
    differing = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    surplus = [path for path in CONFIGS.rglob("*.yaml") if path not in wanted]
    for path in differing + surplus:
        print(f"{'not current' if check else 'written' if path in wanted else 'removed'}: {path.relative_to(CONFIGS)}")
        if check:
            continue
        if path in wanted:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted[path])
        else:
            path.unlink()
    return len(differing + surplus) if check else 0


if __name__ == "__main__":
    sys.exit(main())
