"""Help text from a settings dataclass: each field with its type, default and comment."""

import ast
import dataclasses
import inspect
import json
import textwrap
from collections.abc import Callable
from typing import Any

from torchtune.config._schema import settings_fields, settings_of, type_text


def field_comments(cls: type) -> dict[str, str]:
    """Return the ``#`` comment directly above each field of ``cls``, read from its source."""
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):
        return {}
    lines = source.splitlines()
    comments = {}
    for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            start = node.lineno - 1
            while start > 0 and lines[start - 1].lstrip().startswith("#"):
                start -= 1
            block = [line.lstrip().lstrip("#").strip() for line in lines[start : node.lineno - 1]]
            comments[node.target.id] = " ".join(part for part in block if part)
    return comments


def describe_settings(settings_cls: Callable[..., Any]) -> str:
    """Return a recipe's settings as ``--help`` text; takes the settings dataclass or the ``recipe_main``."""
    if inspect.isfunction(settings_cls):
        settings_cls = settings_of(settings_cls)
    if not dataclasses.is_dataclass(settings_cls):
        return "This recipe declares no settings: read its file for the keys that it takes.\n"
    comments = field_comments(settings_cls)
    doc = settings_cls.__doc__ or ""
    generated = doc.startswith(f"{settings_cls.__name__}(")  # the docstring that @dataclass generates
    parts = [] if generated or not doc else [inspect.cleandoc(doc).splitlines()[0], ""]
    for name, setting in settings_fields(settings_cls).items():
        default = "required" if setting.required else f"default: {_format_default(setting.default)}"
        parts.append(f"  {name}: {type_text(setting.annotation)} ({default})")
        if comments.get(name):
            parts.extend(textwrap.wrap(comments[name], 110, initial_indent=" " * 6, subsequent_indent=" " * 6))
    return "\n".join(parts) + "\n"


def _format_default(value: Any) -> str:
    if value is None:
        return "null"
    return json.dumps(value) if isinstance(value, (bool, list, dict)) else str(value)
