"""The passes over a parsed config: its shape against the dataclass, its components against their signatures."""

import inspect
from typing import Annotated, Any

from torchtune.config._errors import MAX_MISTAKES, InstantiationError, KeyPath, _distance, dotted, nearest
from torchtune.config._interpolate import UNRESOLVED
from torchtune.config._locate import locate
from torchtune.config._reader import Document
from torchtune.config._schema import (
    PLAIN,
    RuntimeArgs,
    build_settings,
    is_configurable,
    members,
    settings_fields,
    type_text,
)
from torchtune.config._signature import Accepts, Argument, accepts, remaining
from torchtune.config._values import anything, check_value, is_component


class Checker:
    """Checks one document; every mistake is noted there, ``finish`` raises them together."""

    def __init__(self, document: Document, caller_globals: dict[str, Any] | None = None) -> None:
        self.document, self.scope = document, caller_globals
        self.queue: list[tuple[KeyPath, dict[str, Any], RuntimeArgs | None]] = []
        self.components: set[KeyPath] = set()
        self.known: dict[str, list[str]] = {}  # every name of the schema -> where it belongs
        self.unknown: list[tuple[KeyPath, list[str], list[str], str]] = []
        self.missing: list[tuple[KeyPath, str]] = []

    def fields(self, path: KeyPath, data: dict[str, Any], cls: type, accepted: tuple[str, ...] = ()) -> dict[str, Any]:
        """Check a mapping against a dataclass (``accepted``: further keys) and return its values in final types."""
        found, before = settings_fields(cls), self._count()
        self._learn(path, list(found))
        values = {}
        for key, value in data.items():
            if key in accepted:
                continue
            if key not in found:
                unused = [name for name in found if name not in data]
                self.unknown.append(((*path, key), unused, list(found), "there is no such setting"))
            elif value == "???":
                self.document.add((*path, key), "must be given: ??? stands for a value that you fill in")
            else:
                values[key] = check_value(self.document, (*path, key), value, found[key].annotation, self)
        for name, setting in found.items():
            if setting.required and name not in data:
                self.missing.append(((*path, name), f"is required ({type_text(setting.annotation)}) but not given"))
        if self._count() == before:
            self._rules(path, cls, values)
        return values

    def _count(self) -> int:
        return self.document.count + len(self.unknown) + len(self.missing)

    def _rules(self, path: KeyPath, cls: type, values: dict[str, Any]) -> None:
        """Run what the dataclass says about its values together."""
        try:
            instance = build_settings(cls, values)
            for key, message in instance.check() if hasattr(instance, "check") else ():
                self.document.add((*path, *_split(key)), message)
        except ValueError as error:
            self.document.add(path, str(error))

    def component(self, path: KeyPath, node: dict[str, Any], hand: RuntimeArgs | None) -> None:
        """Remember a component node; signatures are read after the shapes."""
        if hand is None and any(path[:end] in self.components for end in range(len(path))):
            hand = RuntimeArgs()  # an argument of another component: nobody hands it anything
        self.components.add(path)
        self.queue.append((path, node, hand))

    def finish(self) -> None:
        """Check the components, then raise ``ConfigError`` if anything was wrong."""
        while self.queue and len(self.document.mistakes) < MAX_MISTAKES:
            self._bind(*self.queue.pop(0))
        self._suggest()
        self.document.check()

    def _bind(self, path: KeyPath, node: dict[str, Any], hand: RuntimeArgs | None) -> None:
        name = node["_component_"]
        if isinstance(name, str) and UNRESOLVED in name:
            return
        try:
            target = locate(name, self.scope)
        except (InstantiationError, ValueError) as error:
            self.document.add((*path, "_component_"), str(error))
            anything(path, {key: value for key, value in node.items() if key != "_component_"}, self)
            return
        if is_configurable(target):
            self.fields(path, node, target.Config, accepted=("_component_",))
            self._handed(path, name, remaining(accepts(target), 1), hand, set())
        elif callable(target):
            signature = accepts(target, {*node, *(hand.keywords if hand else ())} - {"_component_"})
            self._learn(path, list(signature.named))
            taken = self._handed(path, name, signature, hand, set(node))
            self._arguments(path, node, signature, hand, taken)
        else:
            kind = "module" if inspect.ismodule(target) else type(target).__name__
            self.document.add((*path, "_component_"), f"'{name}' is a {kind}, not a class or function")

    def _handed(
        self, path: KeyPath, name: str, signature: Accepts, hand: RuntimeArgs | None, given: set[str]
    ) -> dict[str, str]:
        """Check what the recipe hands over; returns the names that it fills, and what with."""
        if hand is None:
            return {}
        count = len(hand.positional)
        taken = dict(zip(signature.order, hand.positional, strict=False))
        taken |= {keyword: keyword for keyword in hand.keywords if keyword in signature.named}
        if count > len(signature.order) and not signature.variadic and not signature.open:
            extra = ", ".join(hand.positional[len(signature.order) :])
            self.document.add(path, f"{name} takes no argument for the {extra} that the recipe hands over")
        for keyword in hand.keywords:
            if keyword not in signature.named and not signature.open and not signature.swallows:
                self.document.add(path, f"{name} takes no argument '{keyword}', which the recipe hands over")
        for key, argument in signature.named.items():
            if argument.required and key not in taken and key not in given:
                self.missing.append(((*path, key), f"{name} needs this argument, but it is not given"))
        return taken

    def _arguments(
        self, path: KeyPath, node: dict[str, Any], signature: Accepts, hand: RuntimeArgs | None, taken: dict[str, str]
    ) -> None:
        name = node["_component_"]
        for key, value in node.items():
            here = (*path, key)
            if key == "_component_":
                continue
            if key in taken and taken[key] == key:
                self.document.add(here, f"is handed to {name} by the recipe: remove it")
            elif key in taken:
                self.document.add(
                    here, f"is where {name} gets the {taken[key]} of the recipe: let it take that first, or remove this"
                )
            elif key not in signature.named and not signature.open:
                unused = [known for known in signature.named if known not in node and known not in taken]
                self.unknown.append((here, unused, list(signature.named), f"{name} takes no argument '{key}'"))
                anything(here, value, self)
            else:
                annotation = signature.named.get(str(key), Argument()).annotation
                rule = hand.rules.get(str(key)) if hand is not None else None
                if rule is not None:
                    annotation = Annotated[float if annotation is Any else annotation, rule]
                if is_component(value) and any(member not in PLAIN for member in members(annotation)):
                    annotation = Any  # what it builds is of the right type, or not: that is seen when it is built
                node[key] = check_value(self.document, here, value, annotation, self)

    def _learn(self, path: KeyPath, names: list[str]) -> None:
        for name in names:
            self.known.setdefault(name, []).append(dotted((*path, name)))

    def _suggest(self) -> None:
        """Give every unknown key the nearest right name; a key that is merely misspelt is not missing too."""
        meant: set[KeyPath] = set()
        for path, unused, local_names, reason in self.unknown[:MAX_MISTAKES]:
            key = str(path[-1])
            local, other = nearest(key, unused), nearest(key, local_names)
            if local is None or (other and _distance(key, other) < _distance(key, local)):
                local = other  # a name that is there already is meant where it is nearer: a section, misspelt
            elsewhere = [full for full in self.known.get(key, []) if full != dotted(path)]
            if local and (not elsewhere or _distance(key, local) == 1):
                hint = f"; did you mean '{local}'?"
                meant.add((*path[:-1], local))
            elif elsewhere:
                hint = f"; did you mean '{elsewhere[0]}'?"
            else:
                far = nearest(key, self.known)
                hint = f"; did you mean '{self.known[far][0]}'?" if far else ""
            self.document.add(path, reason + hint)
        for path, reason in self.missing:
            if path not in meant:
                self.document.add(path, reason, at=path[:-1])


def _split(key: str) -> KeyPath:
    return tuple(int(part) if part.isdigit() else part for part in key.split("."))
