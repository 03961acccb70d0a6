"""A value against an annotation: what is wrong with it, and the value in its final type."""

import dataclasses
import math
import os
import typing
from collections.abc import Mapping, Sequence, Set
from typing import Any, Literal, Protocol, get_args, get_origin

from torchtune.config._errors import KeyPath, brief, did_you_mean
from torchtune.config._interpolate import UNRESOLVED
from torchtune.config._reader import Document, read_value
from torchtune.config._schema import PLAIN, Component, Range, RuntimeArgs, members, split_annotated, type_text
from torchtune.config._secrets import REDACTED, hide, is_secret, stands_for


class Visitor(Protocol):
    """Receives the structured values that a check finds."""

    def component(self, path: KeyPath, node: dict[str, Any], hand: RuntimeArgs | None) -> None:
        """A component node, and what is handed over to it (``None``: unknown)."""

    def fields(self, path: KeyPath, data: dict[str, Any], cls: type) -> dict[str, Any]:
        """A mapping that is an instance of the dataclass ``cls``; returns its checked values."""


def shown(value: Any, path: KeyPath = ()) -> str:
    """A value as messages show it: ``'two' (str)``; ``path`` tells whether it is a secret."""
    kinds = {dict: "a mapping", list: "a list", type(None): "null"}
    if type(value) in kinds:
        return kinds[type(value)]
    secret = any(is_secret(str(key), value) for key in path)
    text = REDACTED if secret else stands_for(value) or brief(hide(repr(value)))
    return f"{text} ({type(value).__name__})"


def is_component(value: Any) -> bool:
    """Whether ``value`` is a section with a ``_component_`` key."""
    return isinstance(value, dict) and "_component_" in value


def _fits(value: Any, member: Any) -> bool | None:
    """Whether the kind of ``value`` is that of ``member``; ``None`` where an annotation cannot tell."""
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
    if origin in PLAIN:
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
        return False  # YAML has no way to write one
    return None


def check_value(document: Document, path: KeyPath, value: Any, annotation: Any, visitor: Visitor) -> Any:
    """Check ``value`` against ``annotation``, note every mistake, and return the value in its final type.

    Component nodes are handed to ``visitor`` and returned as they are; dataclasses stay plain mappings.
    """
    base, extras = split_annotated(annotation)
    if isinstance(value, str) and UNRESOLVED in value:
        return value
    # The very type of the value goes before one that it can be turned into.
    alternatives = sorted(members(base), key=lambda member: split_annotated(member)[0] is not type(value))
    fits = [_fits(value, member) for member in alternatives]
    written = document.places.get(path)
    if not any(fits) and str in alternatives and written and written.raw and isinstance(value, (int, float)):
        return written.raw  # a number typed on the command line for a setting that is text
    if True not in fits:
        if None in fits:
            return anything(path, value, visitor)
        _refuse(document, path, value, annotation)
        return value
    chosen = alternatives[fits.index(True)]
    if is_component(value) and all(split_annotated(member)[0] is not Component for member in alternatives):
        return anything(path, value, visitor)
    extras = (*extras, *split_annotated(chosen)[1])
    hand = next((extra for extra in extras if isinstance(extra, RuntimeArgs)), RuntimeArgs())
    value = _inside(document, path, value, chosen, hand, visitor)
    if type(value) in (int, float):
        for bounds in extras:
            if isinstance(bounds, Range) and not bounds.holds(value):
                document.add(path, f"must be {bounds}, not {value}")
                break
        else:
            if math.isnan(value):
                document.add(path, "must be a number, not nan")
    return value


def anything(path: KeyPath, value: Any, visitor: Visitor) -> Any:
    """Hand over every component node in a value of unknown type."""
    if is_component(value):
        visitor.component(path, value, None)
    elif isinstance(value, (dict, list)):
        for key, item in list(value.items()) if isinstance(value, dict) else list(enumerate(value)):
            anything((*path, key), item, visitor)
    return value


def _inside(document: Document, path: KeyPath, value: Any, member: Any, hand: RuntimeArgs, visitor: Visitor) -> Any:
    """Check what a value of the right kind contains, and convert it."""
    base, _ = split_annotated(member)
    origin, args = get_origin(base) or base, get_args(base)
    if origin is Component:
        if is_component(value):
            visitor.component(path, value, hand)
        else:
            hint = did_you_mean("_component_", map(str, value)).replace("did you mean", "rename")
            document.add(path, "needs a _component_ key that names the class or function" + hint.replace("?", ""))
        return value
    if origin is float:
        return float(value)
    if dataclasses.is_dataclass(origin):
        return visitor.fields(path, value, origin)
    if isinstance(value, dict) and len(args) == 2:
        return {key: check_value(document, (*path, key), item, args[1], visitor) for key, item in value.items()}
    if isinstance(value, list) and args and isinstance(origin, type):
        fixed = issubclass(origin, tuple) and args[-1] is not Ellipsis
        if fixed and len(args) != len(value):
            document.add(path, f"must have {len(args)} items, not {len(value)}")
            return value
        kinds = args if fixed else [args[0]] * len(value)
        # A list of components hands the same things over to each of them.
        kinds = [typing.Annotated[kind, hand] if Component in members(kind) else kind for kind in kinds]
        return [
            check_value(document, (*path, index), item, kind, visitor)
            for index, (item, kind) in enumerate(zip(value, kinds, strict=True))
        ]
    if isinstance(value, (dict, list)):
        return anything(path, value, visitor)
    return value


def _refuse(document: Document, path: KeyPath, value: Any, annotation: Any) -> None:
    base, _ = split_annotated(annotation)
    choices = [choice for member in members(base) if get_origin(member) is Literal for choice in get_args(member)]
    hint = did_you_mean(value, map(str, choices)) if isinstance(value, str) else ""
    plain = isinstance(value, str) and value.strip()[:1] not in ("", "[", "{")
    if plain and any(_fits(read_value(value), member) for member in members(base)):
        hint = ": write it without quotation marks"
    document.add(path, f"must be {type_text(annotation)}, not {shown(value, path)}{hint}")
