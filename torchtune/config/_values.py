"""Check a value against an annotation and convert it."""

import dataclasses
import math
import os
import typing
from collections.abc import Mapping, Sequence, Set
from typing import Any, Literal, Protocol, get_args, get_origin

from torchtune.config._document import Document, format_value, is_component
from torchtune.config._errors import KeyPath, did_you_mean
from torchtune.config._interpolate import UNRESOLVED
from torchtune.config._schema import (
    PLAIN_TYPES,
    Component,
    Range,
    RuntimeArgs,
    split_annotated,
    type_text,
    union_members,
)


class Visitor(Protocol):
    """Callbacks for structured values found by a check."""

    def visit_component(self, path: KeyPath, node: dict[str, Any], runtime_args: RuntimeArgs | None) -> None:
        """Visit a component node and its runtime arguments (``None``: unknown)."""

    def check_fields(self, path: KeyPath, data: dict[str, Any], cls: type) -> dict[str, Any]:
        """Check a mapping against the dataclass ``cls``; return the checked values."""


def _has_type(value: Any, member: Any) -> bool | None:
    """Return whether ``value`` has the type ``member``; ``None`` if the annotation does not determine it."""
    base, _ = split_annotated(member)
    origin = get_origin(base) or base
    if origin is Any or isinstance(origin, (typing.TypeVar, str)):
        return None
    if origin is Literal:
        return any(type(choice) is type(value) and choice == value for choice in get_args(base))
    if origin is Component:
        return isinstance(value, dict)
    if origin in (None, type(None)):
        return value is None
    if origin is float:
        return type(value) in (int, float)
    if origin in PLAIN_TYPES:
        return type(value) is origin
    if not isinstance(origin, type):
        return None
    if dataclasses.is_dataclass(origin):
        return isinstance(value, dict)
    if issubclass(origin, os.PathLike):
        return isinstance(value, str)
    if issubclass(origin, Mapping):
        return isinstance(value, dict)
    if issubclass(origin, (Sequence, Set)):
        return isinstance(value, list)
    if f"{origin.__module__}.{origin.__name__}" == "torch.Tensor":
        return False  # YAML cannot represent such a value
    return None


def check_value(document: Document, path: KeyPath, value: Any, annotation: Any, visitor: Visitor) -> Any:
    """Check ``value`` against ``annotation``, note every mistake, and return the value in its final type.

    Component nodes are passed to ``visitor`` and returned unchanged; dataclasses stay plain mappings.
    """
    base, extras = split_annotated(annotation)
    if isinstance(value, str) and UNRESOLVED in value:
        return value
    # An exact type match comes before a conversion.
    alternatives = sorted(union_members(base), key=lambda member: split_annotated(member)[0] is not type(value))
    fits = [_has_type(value, member) for member in alternatives]
    written = document.places.get(path)
    if not any(fits) and str in alternatives and written and written.raw and isinstance(value, (int, float)):
        return written.raw  # a number on the command line for a text setting
    if True not in fits:
        if None in fits:
            return visit_components(path, value, visitor)
        _add_type_mistake(document, path, value, annotation)
        return value
    chosen = alternatives[fits.index(True)]
    if is_component(value) and all(split_annotated(member)[0] is not Component for member in alternatives):
        return visit_components(path, value, visitor)
    extras = (*extras, *split_annotated(chosen)[1])
    runtime_args = next((extra for extra in extras if isinstance(extra, RuntimeArgs)), RuntimeArgs())
    value = _convert_contents(document, path, value, chosen, runtime_args, visitor)
    if type(value) in (int, float):
        for bounds in extras:
            if isinstance(bounds, Range) and not bounds.holds(value):
                document.add(path, f"must be {bounds}, not {value}")
                break
        else:
            if math.isnan(value):
                document.add(path, "must be a number, not nan")
    return value


def visit_components(path: KeyPath, value: Any, visitor: Visitor) -> Any:
    """Pass every component node in a value of unknown type to ``visitor``."""
    if is_component(value):
        visitor.visit_component(path, value, None)
    elif isinstance(value, (dict, list)):
        for key, item in list(value.items()) if isinstance(value, dict) else list(enumerate(value)):
            visit_components((*path, key), item, visitor)
    return value


def _convert_contents(
    document: Document, path: KeyPath, value: Any, member: Any, runtime_args: RuntimeArgs, visitor: Visitor
) -> Any:
    """Check the contents of a value of the right type, and convert it."""
    base, _ = split_annotated(member)
    origin, args = get_origin(base) or base, get_args(base)
    if origin is Component:
        if is_component(value):
            visitor.visit_component(path, value, runtime_args)
        else:
            hint = did_you_mean("_component_", map(str, value)).replace("did you mean", "rename")
            document.add(path, "needs a _component_ key that names the class or function" + hint.replace("?", ""))
        return value
    if origin is float:
        return float(value)
    if dataclasses.is_dataclass(origin):
        return visitor.check_fields(path, value, origin)
    if isinstance(value, dict) and len(args) == 2:
        return {key: check_value(document, (*path, key), item, args[1], visitor) for key, item in value.items()}
    if isinstance(value, list) and args and isinstance(origin, type):
        fixed = issubclass(origin, tuple) and args[-1] is not Ellipsis
        if fixed and len(args) != len(value):
            document.add(path, f"must have {len(args)} items, not {len(value)}")
            return value
        kinds = args if fixed else [args[0]] * len(value)
        # Every component in a list gets the same runtime arguments.
        kinds = [typing.Annotated[kind, runtime_args] if Component in union_members(kind) else kind for kind in kinds]
        return [
            check_value(document, (*path, index), item, kind, visitor)
            for index, (item, kind) in enumerate(zip(value, kinds, strict=True))
        ]
    if isinstance(value, (dict, list)):
        return visit_components(path, value, visitor)
    return value


def _add_type_mistake(document: Document, path: KeyPath, value: Any, annotation: Any) -> None:
    base, _ = split_annotated(annotation)
    choices = [choice for member in union_members(base) if get_origin(member) is Literal for choice in get_args(member)]
    hint = did_you_mean(value, map(str, choices)) if isinstance(value, str) else ""
    document.add(path, f"must be {type_text(annotation)}, not {format_value(value, path)}{hint}")
