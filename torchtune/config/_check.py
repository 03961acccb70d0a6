"""Check a parsed config against the settings dataclass and the signatures of components, and build the settings."""

import dataclasses
import inspect
import math
import os
import typing
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Annotated, Any, Literal, get_args, get_origin

from torchtune._lazy import former_argument
from torchtune.config._components import Accepts, Argument, accepts, as_written, locate, qualify, remaining
from torchtune.config._document import Document, format_value, is_component, iter_items
from torchtune.config._errors import (
    MAX_MISTAKES,
    MISSPELT,
    MISSPELT_ARGUMENT,
    InstantiationError,
    KeyPath,
    did_you_mean,
    join_key,
    nearest,
    split_key,
    suggestion,
)
from torchtune.config._references import UNRESOLVED
from torchtune.config._settings import (
    PLAIN_TYPES,
    Component,
    ObjectPath,
    Range,
    RuntimeArgs,
    is_configurable,
    settings_fields,
    split_annotated,
    type_text,
    union_members,
)
from torchtune.utils import get_logger, log_once

_NEARLY_EQUAL = 0.8  # similarity of a name of another section that is worth a suggestion


class Checker:
    """Checker of one document: mistakes are collected, and ``raise_mistakes`` raises them together.

    The steps, in this order: ``check_fields`` checks the values, which imports nothing, and queues their components.
    ``check_components`` imports these, while there are fewer mistakes than a message lists, and converts their
    arguments. ``raise_mistakes`` raises. ``build_settings`` then builds the dataclass.

    Names in the recipe's file are qualified by its module: other parts of the library, which build components of the
    settings, cannot know the recipe.

    Args:
        document: the config, with its references resolved.
        namespace: globals of the recipe, for components that its file defines.
        referenced_keys: top-level keys that references name; they need not be settings.
    """

    def __init__(
        self, document: Document, namespace: Mapping[str, Any] | None = None, referenced_keys: Collection[str] = ()
    ) -> None:
        self.document = document
        self.namespace: Mapping[str, Any] = {} if namespace is None else namespace
        self.referenced_keys = referenced_keys
        self.queue: list[tuple[KeyPath, dict[str, Any], RuntimeArgs | None]] = []
        self.components: set[KeyPath] = set()
        self.accepted_names: dict[str, list[str]] = {}  # name of a setting or argument -> dotted paths that accept it
        self.unknown: list[tuple[KeyPath, list[str], str]] = []  # path, valid names, reason
        self.missing: list[tuple[KeyPath, str]] = []
        self.notes: dict[str, str | None] = {}  # top-level key that nothing reads -> nearest valid name

    def check_fields(
        self, path: KeyPath, data: dict[str, Any], cls: type, other_valid_keys: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """Check a mapping against a dataclass, and return the converted values; skip the ``other_valid_keys``."""
        settings = settings_fields(cls)
        mistakes_before = self._count_mistakes()
        self._add_accepted_names(path, settings)
        values = {}
        for key, value in data.items():
            if key in other_valid_keys:
                continue
            if key not in settings:
                is_variable = not path and key in self.referenced_keys  # of the user's own, which references read
                if not is_variable:
                    self.unknown.append(((*path, key), list(settings), "there is no such setting"))
            elif value == "???":
                self.document.add_mistake((*path, key), "must be given: ??? stands for a value that you fill in")
            else:
                values[key] = self.check_value((*path, key), value, settings[key].annotation)
        for name, setting in settings.items():
            if setting.required and name not in data:
                self.missing.append(((*path, name), f"is required ({type_text(setting.annotation)}) but not given"))
        # The class tests values together in `__post_init__` and `check()`, which rely on the types of its fields. This
        # instance is only for these tests: the arguments of its components are not converted yet. If a reference could
        # not be resolved, a mistake from before, its value is a text.
        has_unresolved = any(isinstance(value, str) and UNRESOLVED in value for value in values.values())
        if self._count_mistakes() == mistakes_before and not has_unresolved:
            try:
                instance = build_settings(cls, values)
                if hasattr(instance, "check"):
                    for name, message in instance.check():
                        self.document.add_mistake((*path, *split_key(name)), message)
            except ValueError as error:
                self.document.add_mistake(path, str(error))
        return values

    def _count_mistakes(self) -> int:
        """Return the number of mistakes so far, with those that have no message yet."""
        return self.document.count + len(self.unknown) + len(self.missing)

    def _add_accepted_names(self, path: KeyPath, names: Collection[str]) -> None:
        """Note names that the section at ``path`` accepts, for suggestions."""
        for name in names:
            self.accepted_names.setdefault(name, []).append(join_key((*path, name)))

    # Values

    def check_value(self, path: KeyPath, value: Any, annotation: Any) -> Any:
        """Check ``value`` against ``annotation``, note every mistake, and return the value in its final type.

        A component node is queued and returned itself, not a copy: ``check_components`` converts its arguments in
        place. Dataclasses stay plain mappings.
        """
        base, extras = split_annotated(annotation)  # int and (Range(min=1),) of Annotated[int, Range(min=1)]
        if isinstance(value, str) and UNRESOLVED in value:
            return value  # its reference is a mistake already
        # An exact type match comes before a conversion: an integer stays one for `float | int`.
        alternatives = sorted(union_members(base), key=lambda member: split_annotated(member)[0] is not type(value))
        fits = [_has_type(value, member) for member in alternatives]
        if not any(fits) and str in alternatives and isinstance(value, (int, float)):
            position = self.document.positions.get(path)
            # A number on the command line for a text setting: its text as it was typed, such as 007.
            if position is not None and position.raw:
                return position.raw
        if True not in fits:
            if None in fits:  # the annotation says nothing of its type
                return self.visit_components(path, value)
            self._add_type_mistake(path, value, annotation)
            return value
        member = alternatives[fits.index(True)]
        # A mapping that is a component, where any mapping is allowed.
        if is_component(value) and all(split_annotated(option)[0] is not Component for option in alternatives):
            return self.visit_components(path, value)
        extras = (*extras, *split_annotated(member)[1])
        runtime_args = next((extra for extra in extras if isinstance(extra, RuntimeArgs)), RuntimeArgs())
        for extra in extras:
            if isinstance(extra, ObjectPath):
                return self._check_object_path(path, value, extra.required)
        value = self._convert_contents(path, value, member, runtime_args)
        if type(value) in (int, float):
            exceeded = [extra for extra in extras if isinstance(extra, Range) and not extra.holds(value)]
            if exceeded:
                self.document.add_mistake(path, f"must be {exceeded[0]}, not {value}")
            elif math.isnan(value):  # refused without bounds, too
                self.document.add_mistake(path, "must be a number, not nan")
        return value

    def _check_object_path(self, path: KeyPath, text: str, required: bool) -> str:
        """Check that the object exists, if it must, and return its path, qualified."""
        if not required:
            # A recipe imports modules such as json, whose names have another meaning in the setting.
            if callable(self.namespace.get(text)):
                return qualify(text, self.namespace)
            return text
        try:
            locate(text, self.namespace)
        except (InstantiationError, ValueError) as error:
            self.document.add_mistake(path, str(error))
            return text
        return qualify(text, self.namespace)

    def _add_type_mistake(self, path: KeyPath, value: Any, annotation: Any) -> None:
        """Add a mistake for a value of another type, or for a text that is none of the choices."""
        hint = ""
        if isinstance(value, str):
            base, _ = split_annotated(annotation)
            choices: list[str] = []
            for member in union_members(base):
                if get_origin(member) is Literal:
                    choices += map(str, get_args(member))
            hint = did_you_mean(value, choices)
        self.document.add_mistake(path, f"must be {type_text(annotation)}, not {format_value(value, path)}{hint}")

    def _convert_contents(self, path: KeyPath, value: Any, member: Any, runtime_args: RuntimeArgs) -> Any:
        """Check the contents of a value of the right type, and convert it."""
        base, _ = split_annotated(member)
        origin = get_origin(base) or base
        args = get_args(base)
        if origin is Component:
            if is_component(value):
                self.visit_component(path, value, runtime_args)
            else:
                reason = "needs a _component_ key that names the class or function"
                misspelt = nearest("_component_", map(str, value))
                if misspelt:
                    reason += f"; rename '{misspelt}'"
                self.document.add_mistake(path, reason)
            return value
        if origin is float:  # which an integer is for as well
            return float(value)
        if dataclasses.is_dataclass(origin):
            return self.check_fields(path, value, origin)
        if isinstance(value, dict) and len(args) == 2:
            return {key: self.check_value((*path, key), item, args[1]) for key, item in value.items()}
        if isinstance(value, list) and args and isinstance(origin, type):
            return self._convert_items(path, value, origin, args, runtime_args)
        if isinstance(value, (dict, list)):  # the annotation says nothing of the contents
            return self.visit_components(path, value)
        return value

    def _convert_items(
        self, path: KeyPath, items: list[Any], origin: type, args: tuple[Any, ...], runtime_args: RuntimeArgs
    ) -> list[Any]:
        """Check the items of a list for a setting of type ``origin[args]``: a list, or a tuple of fixed length."""
        has_fixed_length = issubclass(origin, tuple) and args[-1] is not Ellipsis
        if has_fixed_length and len(args) != len(items):
            self.document.add_mistake(path, f"must have {len(args)} items, not {len(items)}")
            return items
        values = []
        for index, item in enumerate(items):
            annotation = args[0]
            if has_fixed_length:
                annotation = args[index]
            # Every component in a list gets the same runtime arguments.
            if Component in union_members(annotation):
                annotation = Annotated[annotation, runtime_args]
            values.append(self.check_value((*path, index), item, annotation))
        return values

    # Components

    def visit_components(self, path: KeyPath, value: Any) -> Any:
        """Queue every component node in a value of unknown type; return the value."""
        if is_component(value):
            self.visit_component(path, value, None)
        elif isinstance(value, (dict, list)):
            for key, item in iter_items(value):
                self.visit_components((*path, key), item)
        return value

    def visit_component(self, path: KeyPath, node: dict[str, Any], runtime_args: RuntimeArgs | None) -> None:
        """Queue a component node and its runtime arguments (``None``: unknown)."""
        if runtime_args is None and any(path[:end] in self.components for end in range(len(path))):
            runtime_args = RuntimeArgs()  # a component inside another component gets no runtime arguments
        self.components.add(path)
        self.queue.append((path, node, runtime_args))

    def check_components(self) -> None:
        """Check the queued components against their signatures, and convert their arguments in their nodes."""
        while self.queue and len(self.document.mistakes) < MAX_MISTAKES:
            path, node, runtime_args = self.queue.pop(0)
            self._check_component(path, node, runtime_args)

    def _check_component(self, path: KeyPath, node: dict[str, Any], runtime_args: RuntimeArgs | None) -> None:
        """Import a component, and check its node against its ``Config`` or its signature; the node is converted."""
        name = node["_component_"]
        if isinstance(name, str) and UNRESOLVED in name:
            return  # its reference is a mistake already
        arguments = {key: value for key, value in node.items() if key != "_component_"}
        try:
            target = locate(name, self.namespace)
        except (InstantiationError, ValueError) as error:
            self.document.add_mistake((*path, "_component_"), str(error))
            self.visit_components(path, arguments)  # mistakes of the components inside are shown at the same time
            return
        node["_component_"] = qualify(name, self.namespace)
        if is_configurable(target):
            self.check_fields(path, node, target.Config, other_valid_keys=("_component_",))
            # `__init__` takes the config first, then the runtime arguments; keys in YAML are fields of the config.
            self._bind_runtime_args(path, name, remaining(accepts(target), 1), runtime_args, set())
        elif callable(target):
            names = set(arguments)
            if runtime_args is not None:
                names.update(runtime_args.keywords)
            signature = accepts(target, names)
            self._add_accepted_names(path, signature.named)
            bound = self._bind_runtime_args(path, name, signature, runtime_args, set(node))
            self._check_arguments(path, node, signature, runtime_args, bound)
        else:
            kind = "module" if inspect.ismodule(target) else type(target).__name__
            self.document.add_mistake((*path, "_component_"), f"'{name}' is a {kind}, not a class or function")

    def _bind_runtime_args(
        self, path: KeyPath, name: str, signature: Accepts, runtime_args: RuntimeArgs | None, yaml_keys: set[str]
    ) -> dict[str, str]:
        """Check the runtime arguments; return parameter name -> name of the runtime argument that fills it.

        Empty if the runtime arguments are unknown (``None``): the recipe may then hand over any missing argument.
        """
        if runtime_args is None:
            return {}
        bound = dict(zip(signature.order, runtime_args.positional, strict=False))
        superfluous = runtime_args.positional[len(signature.order) :]
        # Without *args they have no parameter, whatever names **kwargs take.
        if superfluous and not signature.variadic:
            extra = ", ".join(superfluous)
            self.document.add_mistake(path, f"{name} takes no argument for the {extra} that the recipe hands over")
        for keyword in runtime_args.keywords:
            if keyword in signature.named:
                bound[keyword] = keyword
            elif not signature.takes_any_name and not signature.has_kwargs:
                self.document.add_mistake(path, f"{name} takes no argument '{keyword}', which the recipe hands over")
        for key, argument in signature.named.items():
            if argument.required and key not in bound and key not in yaml_keys:
                self.missing.append(((*path, key), f"{name} needs this argument, but it is not given"))
        return bound

    def _check_arguments(
        self,
        path: KeyPath,
        node: dict[str, Any],
        signature: Accepts,
        runtime_args: RuntimeArgs | None,
        bound: dict[str, str],
    ) -> None:
        """Check and convert the arguments in YAML; ``bound`` are the parameters that runtime arguments fill."""
        name = as_written(node["_component_"])
        for key, value in list(node.items()):
            argument_path = (*path, key)
            if key == "_component_":
                continue
            if key not in signature.named and self._replace_former_argument(argument_path, node):
                continue
            if key in bound and bound[key] == key:
                self.document.add_mistake(argument_path, f"is handed to {name} by the recipe: remove it")
            elif key in bound:
                reason = f"is where {name} gets the {bound[key]} of the recipe: let it take that first, or remove this"
                self.document.add_mistake(argument_path, reason)
            elif key not in signature.named and not signature.takes_any_name:
                self.unknown.append((argument_path, list(signature.named), f"{name} takes no argument '{key}'"))
                self.visit_components(argument_path, value)
            else:
                annotation = signature.named.get(str(key), Argument()).annotation
                if runtime_args is not None and str(key) in runtime_args.rules:
                    bounded_type = float if annotation is Any else annotation  # bounds are those of numbers
                    annotation = Annotated[bounded_type, runtime_args.rules[str(key)]]
                if is_component(value) and any(member not in PLAIN_TYPES for member in union_members(annotation)):
                    annotation = Any  # the type of the built object is unknown until it is built
                node[key] = self.check_value(argument_path, value, annotation)

    def _replace_former_argument(self, path: KeyPath, node: dict[str, Any]) -> bool:
        """Remove an argument of earlier releases that has no effect any more, or name what replaces it.

        Args:
            path: path of the argument.
            node: node of the component.

        Returns:
            Whether earlier releases had the argument.
        """
        name = as_written(node["_component_"])
        key = path[-1]
        was_accepted, replacement = former_argument(name, key)
        if not was_accepted:
            return False
        if replacement is None:
            position = self.document.position(path).text
            log_once(get_logger(), f"{position}: {name} ignores '{key}': it has no effect any more.", level=30)
            del node[key]
        else:
            self.document.add_mistake(path, f"{name} takes no argument '{key}' any more: {replacement}")
        return True

    def raise_mistakes(self) -> None:
        """Raise ``ConfigError`` if there are mistakes."""
        # Now, because the suggestions for unknown keys are among the accepted names of all components.
        self._add_unknown_and_missing()
        self.document.check()

    def _add_unknown_and_missing(self) -> None:
        """Add a mistake with a suggestion for each unknown key; notes of the user's own are no mistakes.

        If an unknown key is a misspelled required key, the required key is not reported as missing, too.
        """
        misspelt: set[KeyPath] = set()
        for path, local_names, reason in self.unknown[:MAX_MISTAKES]:  # a message lists no more
            key = str(path[-1])
            # The same name in another section comes first, then a similar one in this section, then one anywhere.
            other_paths = [dotted for dotted in self.accepted_names.get(key, []) if dotted != join_key(path)]
            local_name = None
            if other_paths:
                suggested = other_paths[0]
            else:
                local_name = nearest(key, local_names)
                suggested = local_name
                if local_name is None:
                    similar_name = nearest(key, self.accepted_names, _NEARLY_EQUAL)
                    if similar_name is not None:
                        suggested = self.accepted_names[similar_name][0]
            if len(path) == 1 and is_note(self.document, key, local_names, self.accepted_names):
                self.notes[key] = suggested
                continue
            if local_name:
                misspelt.add((*path[:-1], local_name))
            self.document.add_mistake(path, reason + suggestion(suggested))
        for path, reason in self.missing:
            if path not in misspelt:
                self.document.add_mistake(path, reason, at=path[:-1])  # the key has no line: that of its section


def is_note(document: Document, key: str, settings: Collection[str], arguments: Collection[str]) -> bool:
    """Return whether a top-level key that nothing reads is a note of the user's own, and not a mistake.

    Configs hold names of runs, comments and paths besides settings. A key on the command line is typed to have an
    effect. A number or a switch is rarely a note: it is a mistake if its name resembles a setting's (``num_epochs``)
    or is an argument's (``lr``). Any other value is a mistake only if its name is a setting's with a wrong letter or
    two (``ouput_dir``, but neither ``model_dir`` nor ``checkpoint_dir``, which is an argument's).

    Args:
        document: the config.
        key: a key of the config.
        settings: names of the recipe's settings.
        arguments: names of the settings and of the arguments of the components in the config.
    """
    if document.position((key,)).raw is not None:
        return False
    if isinstance(document.data[key], bool | int | float):
        is_argument = key in arguments or nearest(key, arguments, MISSPELT_ARGUMENT) is not None
        return not is_argument and nearest(key, settings) is None
    return key in arguments or nearest(key, settings, MISSPELT) is None


def _has_type(value: Any, member: Any) -> bool | None:
    """Return whether ``value`` has the type ``member``; ``None`` if the annotation does not determine it."""
    base, _ = split_annotated(member)
    origin = get_origin(base) or base
    if origin is Any or isinstance(origin, (typing.TypeVar, str)):  # a text is an annotation that was not evaluated
        return None
    if origin is Literal:  # of the same type, because True equals 1
        return any(type(choice) is type(value) and choice == value for choice in get_args(base))
    if origin is Component:
        return isinstance(value, dict)  # _convert_contents explains a mapping without _component_
    if origin in (None, type(None)):
        return value is None
    if origin is float:
        return type(value) in (int, float)  # and not bool, a subclass of int
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
    # Compared by name, because this package does not import torch, which is slow.
    if f"{origin.__module__}.{origin.__name__}" == "torch.Tensor":
        return False  # YAML cannot represent such a value
    return None  # another class, which may convert a plain value itself


def build_settings(cls: type, values: Mapping[str, Any]) -> Any:
    """Build the dataclass ``cls`` from checked values; component nodes become ``DictConfig``."""
    fields = settings_fields(cls)
    arguments = {}
    for name, value in values.items():
        arguments[name] = _convert_component_nodes(value, fields[name].annotation)
    return cls(**arguments)


def _convert_component_nodes(value: Any, annotation: Any) -> Any:
    """Convert the nodes of a checked value to the types of its annotation.

    Component nodes at any depth become ``DictConfig``, nodes of dataclasses become instances, and lists become tuples
    where the annotation has a tuple. All other values stay.
    """
    from omegaconf import OmegaConf

    base, _ = split_annotated(annotation)
    for member in union_members(base):
        kind, _ = split_annotated(member)
        origin = get_origin(kind) or kind
        args = get_args(kind)
        if isinstance(value, dict) and origin is Component:
            return OmegaConf.create(value)
        if isinstance(value, dict) and dataclasses.is_dataclass(origin):
            return build_settings(origin, value)
        if isinstance(value, dict) and origin in (dict, Mapping) and len(args) == 2:
            return {key: _convert_component_nodes(item, args[1]) for key, item in value.items()}
        if isinstance(value, list) and origin in (list, Sequence) and args:
            return [_convert_component_nodes(item, args[0]) for item in value]
        if isinstance(value, list) and origin is tuple:
            if not args:
                return tuple(value)
            item_annotations = args
            if args[-1] is Ellipsis:  # tuple[X, ...], of any length
                item_annotations = [args[0]] * len(value)
            items = []
            for item, item_annotation in zip(value, item_annotations, strict=True):
                items.append(_convert_component_nodes(item, item_annotation))
            return tuple(items)
    return value
