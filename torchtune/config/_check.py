"""Check a parsed config: keys and values against the settings dataclass, components against their signatures."""

import dataclasses
import inspect
import math
import os
import typing
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Annotated, Any, Literal, Protocol, get_args, get_origin

from torchtune._lazy import former_argument
from torchtune.config._components import Accepts, Argument, accepts, locate, remaining
from torchtune.config._document import Document, format_value, is_component
from torchtune.config._errors import MAX_MISTAKES, InstantiationError, KeyPath, did_you_mean, join_key, nearest
from torchtune.config._interpolate import UNRESOLVED
from torchtune.config._recipe_check import is_note
from torchtune.config._schema import (
    PLAIN_TYPES,
    Component,
    Range,
    RuntimeArgs,
    build_settings,
    is_configurable,
    settings_fields,
    split_annotated,
    type_text,
    union_members,
)
from torchtune.utils import get_logger, log_once


class Checker:
    """Checker of one document: mistakes are collected, and ``finish`` raises them together.

    Args:
        document: the config, with its references resolved.
        caller_globals: globals of the recipe, for components that its file defines.
        variables: top-level keys that references name; they need not be settings.
    """

    def __init__(
        self, document: Document, caller_globals: dict[str, Any] | None = None, variables: Collection[str] = ()
    ) -> None:
        self.document, self.caller_globals, self.variables = document, caller_globals, variables
        self.queue: list[tuple[KeyPath, dict[str, Any], RuntimeArgs | None]] = []
        self.components: set[KeyPath] = set()
        self.known: dict[str, list[str]] = {}  # schema name -> dotted paths that accept it
        self.unknown: list[tuple[KeyPath, list[str], str]] = []  # path, valid names, reason
        self.missing: list[tuple[KeyPath, str]] = []
        self.notes: dict[str, str | None] = {}  # top-level key that nothing reads -> nearest valid name

    def check_fields(
        self, path: KeyPath, data: dict[str, Any], cls: type, accepted: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """Check a mapping against a dataclass and return the converted values; ``accepted`` are further valid keys."""
        found, before = settings_fields(cls), self._count_mistakes()
        self._add_known_names(path, list(found))
        values = {}
        for key, value in data.items():
            if key in accepted:
                continue
            if key not in found and not path and key in self.variables:
                continue
            if key not in found:
                self.unknown.append(((*path, key), list(found), "there is no such setting"))
            elif value == "???":
                self.document.add((*path, key), "must be given: ??? stands for a value that you fill in")
            else:
                values[key] = check_value(self.document, (*path, key), value, found[key].annotation, self)
        for name, setting in found.items():
            if setting.required and name not in data:
                self.missing.append(((*path, name), f"is required ({type_text(setting.annotation)}) but not given"))
        if self._count_mistakes() == before:
            self._check_rules(path, cls, values)
        return values

    def _count_mistakes(self) -> int:
        return self.document.count + len(self.unknown) + len(self.missing)

    def _check_rules(self, path: KeyPath, cls: type, values: dict[str, Any]) -> None:
        """Run the dataclass's ``__post_init__`` and ``check()``, which test values together."""
        try:
            instance = build_settings(cls, values)
            for key, message in instance.check() if hasattr(instance, "check") else ():
                self.document.add((*path, *_split_key(key)), message)
        except ValueError as error:
            self.document.add(path, str(error))

    def visit_component(self, path: KeyPath, node: dict[str, Any], runtime_args: RuntimeArgs | None) -> None:
        """Queue a component node; signatures are checked after all values."""
        if runtime_args is None and any(path[:end] in self.components for end in range(len(path))):
            runtime_args = RuntimeArgs()  # a component inside another component gets no runtime arguments
        self.components.add(path)
        self.queue.append((path, node, runtime_args))

    def check_components(self) -> None:
        """Check the queued components against their signatures."""
        while self.queue and len(self.document.mistakes) < MAX_MISTAKES:
            self._bind(*self.queue.pop(0))

    def finish(self) -> None:
        """Check the queued components, then raise ``ConfigError`` if there are mistakes."""
        self.check_components()
        self._suggest()
        self.document.check()

    def _bind(self, path: KeyPath, node: dict[str, Any], runtime_args: RuntimeArgs | None) -> None:
        name = node["_component_"]
        if isinstance(name, str) and UNRESOLVED in name:
            return
        try:
            target = locate(name, self.caller_globals)
        except (InstantiationError, ValueError) as error:
            self.document.add((*path, "_component_"), str(error))
            visit_components(path, {key: value for key, value in node.items() if key != "_component_"}, self)
            return
        if is_configurable(target):
            self.check_fields(path, node, target.Config, accepted=("_component_",))
            self._bind_runtime_args(path, name, remaining(accepts(target), 1), runtime_args, set())
        elif callable(target):
            signature = accepts(target, {*node, *(runtime_args.keywords if runtime_args else ())} - {"_component_"})
            self._add_known_names(path, list(signature.named))
            taken = self._bind_runtime_args(path, name, signature, runtime_args, set(node))
            self._check_arguments(path, node, signature, runtime_args, taken)
        else:
            kind = "module" if inspect.ismodule(target) else type(target).__name__
            self.document.add((*path, "_component_"), f"'{name}' is a {kind}, not a class or function")

    def _bind_runtime_args(
        self, path: KeyPath, name: str, signature: Accepts, runtime_args: RuntimeArgs | None, given: set[str]
    ) -> dict[str, str]:
        """Check the runtime arguments; return parameter name -> name of the runtime argument that fills it."""
        if runtime_args is None:
            return {}
        count = len(runtime_args.positional)
        taken = dict(zip(signature.order, runtime_args.positional, strict=False))
        taken |= {keyword: keyword for keyword in runtime_args.keywords if keyword in signature.named}
        if count > len(signature.order) and not signature.variadic and not signature.open:
            extra = ", ".join(runtime_args.positional[len(signature.order) :])
            self.document.add(path, f"{name} takes no argument for the {extra} that the recipe hands over")
        for keyword in runtime_args.keywords:
            if keyword not in signature.named and not signature.open and not signature.ignores_unknown:
                self.document.add(path, f"{name} takes no argument '{keyword}', which the recipe hands over")
        for key, argument in signature.named.items():
            if argument.required and key not in taken and key not in given:
                self.missing.append(((*path, key), f"{name} needs this argument, but it is not given"))
        return taken

    def _check_arguments(
        self,
        path: KeyPath,
        node: dict[str, Any],
        signature: Accepts,
        runtime_args: RuntimeArgs | None,
        taken: dict[str, str],
    ) -> None:
        name = node["_component_"]
        for key, value in list(node.items()):
            here = (*path, key)
            if key == "_component_":
                continue
            was_taken, replacement = former_argument(name, key) if key not in signature.named else (False, None)
            if was_taken and replacement is None:
                message = f"{self.document.place(here).text}: {name} ignores '{key}': it has no effect any more."
                log_once(get_logger(), message, level=30)
                del node[key]
                continue
            if was_taken:
                self.document.add(here, f"{name} takes no argument '{key}' any more: {replacement}")
                continue
            if key in taken and taken[key] == key:
                self.document.add(here, f"is handed to {name} by the recipe: remove it")
            elif key in taken:
                self.document.add(
                    here, f"is where {name} gets the {taken[key]} of the recipe: let it take that first, or remove this"
                )
            elif key not in signature.named and not signature.open:
                self.unknown.append((here, list(signature.named), f"{name} takes no argument '{key}'"))
                visit_components(here, value, self)
            else:
                annotation = signature.named.get(str(key), Argument()).annotation
                rule = runtime_args.rules.get(str(key)) if runtime_args is not None else None
                if rule is not None:
                    annotation = Annotated[float if annotation is Any else annotation, rule]
                if is_component(value) and any(member not in PLAIN_TYPES for member in union_members(annotation)):
                    annotation = Any  # the type of the built object is unknown until it is built
                node[key] = check_value(self.document, here, value, annotation, self)

    def _add_known_names(self, path: KeyPath, names: list[str]) -> None:
        for name in names:
            self.known.setdefault(name, []).append(join_key((*path, name)))

    def _suggest(self) -> None:
        """Add a suggestion to each unknown key; notes of the user's own are no mistakes.

        If an unknown key is a misspelled required key, the required key is not reported as missing, too.
        """
        meant: set[KeyPath] = set()
        for path, local_names, reason in self.unknown[:MAX_MISTAKES]:
            key = str(path[-1])
            elsewhere = [full for full in self.known.get(key, []) if full != join_key(path)]
            local = None if elsewhere else nearest(key, local_names)
            far = None if elsewhere or local else nearest(key, self.known)
            found = local or next(iter(elsewhere), None) or (self.known[far][0] if far else None)
            if len(path) == 1 and is_note(self.document, key, local_names, self.known):
                self.notes[key] = found
                continue
            if local:
                meant.add((*path[:-1], local))
            self.document.add(path, reason + (f"; did you mean '{found}'?" if found else ""))
        for path, reason in self.missing:
            if path not in meant:
                self.document.add(path, reason, at=path[:-1])


def _split_key(key: str) -> KeyPath:
    return tuple(int(part) if part.isdigit() else part for part in key.split("."))


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
