"""JSON schema of a recipe's settings, for editors and programs that write configs."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from torchtune.config._schema import (
    UNIONS,
    Component,
    Range,
    field_comments,
    settings_fields,
    settings_of,
    split_annotated,
)

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_PLAIN = (bool, int, float, str, list, dict, type(None))  # types of defaults that JSON can write
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
# A reference to another setting, such as ${output_dir}/logs, may stand for a value of any type.
_REFERENCE = {"type": "string", "pattern": r"\$\{.+\}"}


def json_schema(settings_cls: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a recipe's settings.

    The schema describes a config before its references (``${output_dir}``) are resolved. Further keys at the top are
    allowed, because other keys may refer to them.

    Args:
        settings_cls: the settings dataclass, or the ``recipe_main`` that takes it.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class Settings:
        ...     # Passes over the data.
        ...     epochs: int = 1
        >>> torchtune.config.json_schema(Settings)["properties"]["epochs"]["default"]
        1
    """
    if inspect.isfunction(settings_cls):
        settings_cls = settings_of(settings_cls)
    schema: dict[str, Any] = {"$schema": _DIALECT, "type": "object"}
    if not dataclasses.is_dataclass(settings_cls):  # a recipe that declares no settings takes any
        return schema
    return {**schema, **_schema_of_fields(settings_cls)}


def _schema_of_fields(settings_cls: type) -> dict[str, Any]:
    """Return the schema of a mapping with the fields of a settings dataclass."""
    comments = field_comments(settings_cls)
    properties = {}
    required = []
    for name, setting in settings_fields(settings_cls).items():
        properties[name] = _schema_of(setting.annotation)
        if comments.get(name):
            properties[name]["description"] = comments[name]
        if setting.required:
            required.append(name)
        elif isinstance(setting.default, _PLAIN):  # a nested settings dataclass has defaults of its own
            properties[name]["default"] = setting.default
    return {"type": "object", "properties": properties, "required": required}


def _schema_of(annotation: Any) -> dict[str, Any]:
    """Return the schema of a setting's values; a reference to another setting is allowed for all types."""
    alternatives = _alternatives(annotation)
    if {"type": "string"} not in alternatives:
        alternatives.append(_REFERENCE)
    return {"anyOf": alternatives}


def _alternatives(annotation: Any) -> list[dict[str, Any]]:
    """Return the schemas of the alternatives of an annotation, one if it is no union."""
    base, extras = split_annotated(annotation)
    origin = get_origin(base)
    args = get_args(base)
    if origin in UNIONS:
        alternatives = []
        for member in args:
            alternatives += _alternatives(member)
    elif origin is Literal:
        alternatives = [{"enum": list(args)}]
    elif base is Component:
        alternatives = [
            {
                "type": "object",
                "properties": {"_component_": {"type": "string", "description": "Path of a class or function."}},
                "required": ["_component_"],
            }
        ]
    elif dataclasses.is_dataclass(base):
        alternatives = [_schema_of_fields(base)]
    elif _is_generic(origin, base, Mapping):
        values = _schema_of(args[1]) if len(args) == 2 else True  # True: any
        alternatives = [{"type": "object", "additionalProperties": values}]
    elif _is_generic(origin, base, Sequence) and base is not str:
        items = _schema_of(args[0]) if args else True
        alternatives = [{"type": "array", "items": items}]
    elif base in _TYPES:
        alternatives = [{"type": _TYPES[base]}]
    else:  # Any, and classes that convert themselves
        alternatives = [{}]
    bounds = _bounds(extras)
    for alternative in alternatives:
        if alternative.get("type") in ("integer", "number"):
            alternative.update(bounds)
    return alternatives


def _is_generic(origin: Any, base: Any, kind: type) -> bool:
    """Return whether an annotation is a ``kind``, with or without types of its members."""
    annotated = base if origin is None else origin
    return isinstance(annotated, type) and issubclass(annotated, kind)


def _bounds(extras: Sequence[Any]) -> dict[str, float]:
    """Return the keywords for the bounds of a number."""
    keywords = {"min": "minimum", "above": "exclusiveMinimum", "max": "maximum", "below": "exclusiveMaximum"}
    bounds = {}
    for extra in extras:
        if not isinstance(extra, Range):
            continue
        for name, keyword in keywords.items():
            limit = getattr(extra, name)
            if limit is not None:
                bounds[keyword] = limit
    return bounds
