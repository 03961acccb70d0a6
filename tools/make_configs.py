"""Write recipes/configs from a template per method, a table of methods and a table of models (`make configs`).

``--check`` writes nothing and fails if a file differs from what would be written.
"""

import argparse
import ast
import functools
import importlib
import string
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from make_model_table import parameters

from torchtune._recipe_registry import find_recipe
from torchtune.models import get_spec

SOURCES = Path(__file__).parent / "configs"
CONFIGS = Path(__file__).parents[1] / "recipes" / "configs"

# Settings that everybody changes: configs show them, whatever their value.
ALWAYS_SHOWN = {
    *("batch_size", "gradient_accumulation_steps", "epochs", "dtype", "enable_activation_checkpointing", "compile"),
    *("max_new_tokens", "temperature", "kd_ratio", "expert_parallel_dim"),
}


class Template(string.Template):
    """``@name`` is filled in; ``$`` belongs to YAML's own references."""

    delimiter = "@"


@functools.cache
def methods() -> dict[str, dict[str, Any]]:
    """The table of methods."""
    return yaml.load((SOURCES / "methods.yaml").read_text(), yaml.CSafeLoader)


@functools.cache
def models() -> dict[str, Any]:
    """The table of models, with its families and the configs with a name of their own."""
    return yaml.load((SOURCES / "models.yaml").read_text(), yaml.CSafeLoader)


def builder(model: str) -> str:
    """The name of a model's builder."""
    return models()["models"][model].get("builder") or model.lower().translate(str.maketrans("/.", "__"))


@functools.cache
def size_and_kind(model: str) -> tuple[int, bool]:
    """The number of parameters, counted on the meta device, and whether it is a mixture of experts."""
    family, row = model.partition("/")[0], models()["models"][model]
    if "parameters" in row:
        return int(float(row["parameters"])), bool(row.get("experts"))
    package = importlib.import_module(f"torchtune.models.{family}")
    description = getattr(package, "SIZES", {}).get(builder(model))
    if description is not None:
        return parameters(description, get_spec(family)), bool(description.num_experts)
    with torch.device("meta"):  # a builder with arguments, or of another family
        built = getattr(package, builder(model))(**row.get("arguments", {}))
    return sum(parameter.numel() for parameter in built.parameters()), False


def holds(range_: dict[str, Any], count: int) -> bool:
    """Whether a number of parameters is in a range of the table of methods."""
    return float(range_.get("from", 0)) <= count < float(range_.get("below", "inf"))


def methods_of(model: str) -> list[str]:
    """The methods that a model has configs of: those that its row names, else those that fit its size."""
    row = models()["models"][model]
    if "configs" in row:
        return row["configs"]
    fitting = [
        method
        for method, entry in methods().items()
        if entry.get("fits") and holds(entry["fits"], size_and_kind(model)[0])
    ]
    return [*fitting, *row.get("also", [])]


def values_of(model: str, method: str) -> dict[str, Any]:
    """What a method's template asks for, as a model has it."""
    values = dict(methods()[method])
    count, mixture = size_and_kind(model)
    for rule in values.get("sizes", []):
        if holds(rule, count) and not (mixture and rule.get("dense")):
            values |= rule
    return values | models()["models"][model].get("changes", {}).get(method, {})


def common(model: str) -> dict[str, str]:
    """What templates read of a model."""
    row = models()["models"][model]
    family, _, size = model.partition("/")
    title = row.get("title") or f"{models()['families'][family]['title']} {size.replace('_', '-')}"
    lines = [f"\n  {name}: {value}" for name, value in row.get("arguments", {}).items()]
    return {
        "title": title,
        "repo": row["repo"],
        "dir": f"/tmp/{row['repo'].rpartition('/')[2]}",
        "family": family,
        "builder": builder(model),
        "arguments": "".join(lines),
    }


def chosen(text: str, parts: Iterable[str]) -> str:
    """A template without the parts that a config does not have: #if PART or #if not PART, then #else, then #end."""
    lines, open_ = [], [True]
    for line in text.splitlines(keepends=True):
        match line.split():
            case ["#if", "not", part]:
                open_.append(part not in parts)
            case ["#if", part]:
                open_.append(part in parts)
            case ["#else"]:
                open_[-1] = not open_[-1]
            case ["#end"]:
                open_.pop()
            case _ if all(open_):
                lines.append(line)
    return "".join(lines)


def render(
    name: str, model: str, method: str, teacher: str | None = None, is_for_any_model: bool = False, **changes: Any
) -> str:
    """The text of one config; one for any model names ``model`` and ``teacher`` as examples."""
    values = (dict(methods()[method]) if is_for_any_model else values_of(model, method)) | changes
    row, shared = models()["models"][model], common(model)
    parts = {*values.get("is", []), *row.get("is", [])} | ({"experts"} if size_and_kind(model)[1] else set())
    if values.get("adapter") == "qlora":
        parts.add("qlora")
    if is_for_any_model:
        parts.add("any")
    if "image_tokens" in parts and "tensor" in values:
        values |= {"tensor": 1}
    devices = "devices" in parts
    values |= {
        "name": name,
        "where": "several devices" if devices else "one device",
        "run": f"tune run --nproc-per-node {values['processes']}" if devices else "tune run",
        "trained": "adapters of " if "adapters" in parts else "",
    }
    if teacher:
        values |= {f"teacher_{key}": value for key, value in common(teacher).items()}
        values["teacher_weights"] = "${teacher_model.checkpoint_dir}" if is_for_any_model else values["teacher_dir"]
    shared["weights"] = "${model.checkpoint_dir}" if is_for_any_model else shared["dir"]
    tokenizer = "hf" if is_for_any_model else models()["families"].get(shared["family"], {}).get("tokenizer", "hf")
    filled = Template((SOURCES / "tokenizers" / f"{tokenizer}.yaml").read_text()).substitute(
        shared | {"dir": shared["weights"]}
    )
    text = chosen((SOURCES / f"{values['template']}.yaml").read_text(), parts)
    text = Template(text).substitute(shared | values, tokenizer=textwrap.indent(filled.rstrip(), "  "))
    return without_defaults(text, values["recipe"])


@functools.cache
def default_settings(recipe: str) -> dict[str, Any]:
    """Setting -> default, read from the text of the recipe."""
    tree = ast.parse(find_recipe(recipe).read_text(encoding="utf-8"))
    (settings,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Settings")
    fields = (node for node in settings.body if isinstance(node, ast.AnnAssign) and node.value is not None)
    constants = (node for node in fields if isinstance(node.value, ast.Constant | ast.UnaryOp))
    return {node.target.id: ast.literal_eval(node.value) for node in constants}


def without_defaults(text: str, recipe: str) -> str:
    """The config without the settings that repeat their default, but for those that are always shown."""
    defaults = default_settings(recipe)
    values = yaml.load(text, yaml.CSafeLoader)
    repeated = {name for name in defaults.keys() & values.keys() - ALWAYS_SHOWN if values[name] == defaults[name]}
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if line.partition(":")[0] not in repeated)


def configs() -> Iterator[tuple[str, str]]:
    """(name, text) of every config."""
    for model in models()["models"]:
        for method in methods_of(model):
            name = f"{model}_{method}"
            yield name, render(name, model, method)
    for name, entry in models()["named"].items():
        changes = entry.get("changes", {})
        is_for_any_model = entry.get("any", False)
        yield name, render(name, entry["model"], entry["method"], entry.get("teacher"), is_for_any_model, **changes)


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
