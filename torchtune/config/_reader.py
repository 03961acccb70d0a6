"""YAML with positions: plain values, and the file and line where every key stands."""

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from torchtune.config._errors import MAX_MISTAKES, ConfigError, KeyPath, Mistake, brief, dotted
from torchtune.config._limits import MAX_BYTES, TooLarge, check_size
from torchtune.config._secrets import hide


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Scalars of YAML 1.2 where 1.1 surprises: ``2e-5`` and ``1e5`` are floats, dates are text."""


_FLOAT = re.compile(
    r"""^(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+
    |[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$""",
    re.VERBOSE,
)
_REPLACED = {"tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp"}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rows if tag not in _REPLACED]
    for first, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
_MERGE = "tag:yaml.org,2002:merge"
_CORE = "tag:yaml.org,2002:"
_SCALARS = {f"{_CORE}{name}" for name in ("str", "int", "float", "bool", "null")}
_MAX_INT = 2**63  # what torch and JSON readers take


class BadValue(yaml.MarkedYAMLError):
    """A scalar that is not of the type that it looks like or is tagged with."""


@dataclass(frozen=True)
class Place:
    """Where a value was written; ``raw`` is its text if it came from the command line."""

    text: str
    line: int = 0
    raw: str | None = None


@dataclass
class Document:
    """A config as plain dicts, lists and scalars, and the place of every key path in it."""

    data: dict[str, Any]
    name: str = ""
    places: dict[KeyPath, Place] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)
    count: int = 0  # of mistakes, those included that are not told
    copies: dict[KeyPath, KeyPath] = field(default_factory=dict)  # ${other}: errors are reported there
    # What came from ${oc.env:…}, also by way of other references: as it was written, and its value
    environment: dict[KeyPath, tuple[str, Any]] = field(default_factory=dict)

    def place(self, path: KeyPath) -> Place:
        """The place of ``path``, or of the nearest section around it that was written."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.places:
                return self.places[path[:end]]
        return Place(self.name)

    def add(self, path: KeyPath, reason: str, at: KeyPath | None = None) -> None:
        """Note a mistake, without secrets; ``at`` is the key to point to where it is not ``path``."""
        self.count += 1
        place = self.place(path if at is None else at)
        mistake = Mistake(place.text, hide(brief(dotted(path), 200)), hide(reason)[:2000], place.line)
        if mistake not in self.mistakes and len(self.mistakes) < MAX_MISTAKES:
            self.mistakes.append(mistake)

    def check(self) -> None:
        """Raise ``ConfigError`` with every mistake, in the order of the lines."""
        keys = {mistake.key for mistake in self.mistakes}
        own = [mistake for mistake in self.mistakes if not self._repeats(mistake.key, keys)]
        if own:
            raise ConfigError(sorted(own, key=lambda mistake: mistake.order))

    def _repeats(self, key: str, keys: set[str]) -> bool:
        copied = [(dotted(copy), dotted(origin)) for copy, origin in self.copies.items()]
        return any(
            key == copy or key.startswith(f"{copy}.") for copy, origin in copied if origin + key[len(copy) :] in keys
        )

    def set(self, path: KeyPath, value: Any, place: Place) -> None:
        """Put ``value`` at ``path``; what stood there is forgotten. The parent must exist."""
        parent = functools.reduce(lambda node, key: node[key], path[:-1], self.data)
        parent[path[-1]] = value
        self.forget(path)
        self.places[path] = place

    def forget(self, path: KeyPath) -> None:
        """Drop the places of ``path`` and of everything below it."""
        for known in [known for known in self.places if known[: len(path)] == path]:
            del self.places[known]


class _Builder:
    """Turns the nodes of one file into values, noting places and duplicate keys."""

    def __init__(self, loader: _Loader, document: Document) -> None:
        self.loader, self.document, self.open = loader, document, set()

    def build(self, node: yaml.Node, path: KeyPath) -> Any:
        if node in self.open:
            self.document.add(path, "contains itself through a YAML alias")
            return None
        if isinstance(node, yaml.ScalarNode):
            return _scalar(self.loader, node)
        if node.tag not in (f"{_CORE}seq", f"{_CORE}map"):
            raise _foreign(node)
        self.open.add(node)
        if isinstance(node, yaml.SequenceNode):
            value: Any = []
            for index, item in enumerate(node.value):
                self._note((*path, index), item)
                value.append(self.build(item, (*path, index)))
        else:
            value = self._mapping(node, path)
        self.open.discard(node)
        return value

    def _note(self, path: KeyPath, node: yaml.Node) -> None:
        line = node.start_mark.line + 1
        self.document.places[path] = Place(f"{self.document.name}:{line}", line)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[Any, Any]:
        value: dict[Any, Any] = {}
        merged: dict[Any, Any] = {}
        for key_node, item in node.value:
            if key_node.tag == _MERGE:
                for source in item.value if isinstance(item, yaml.SequenceNode) else [item]:
                    built = self.build(source, path)
                    merged = {**(built if isinstance(built, dict) else {}), **merged}
                continue
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag.endswith(":null"):
                self.document.add(path, "has a key that is not a plain name")
                continue
            key = _scalar(self.loader, key_node)
            key = key if isinstance(key, int) and not isinstance(key, bool) and path else key_node.value
            full = (*path, key)
            if key in value:
                first = self.document.places[full].text.rpartition(":")[2]
                self._note(full, key_node)
                self.document.add(full, f"is given twice, first in line {first}: remove one")
                continue
            self._note(full, key_node)
            value[key] = self.build(item, full)
        return {**merged, **value}


def _foreign(node: yaml.Node) -> yaml.YAMLError:
    tag = brief(node.tag.replace(_CORE, "!!"))
    problem = f"could not determine a constructor for the tag '{tag}': a config holds plain values only"
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _scalar(loader: _Loader, node: yaml.ScalarNode) -> Any:
    """The value of a scalar; of a plain type, and no larger than numbers are."""
    if node.tag not in _SCALARS:
        raise _foreign(node)
    kind = node.tag.removeprefix(_CORE)
    numeric = kind in ("int", "float")
    try:
        if numeric and len(node.value) > 100:
            raise ValueError
        value = loader.construct_object(node)
        too_large = kind == "int" and abs(value) >= _MAX_INT
        if too_large or (kind == "float" and math.isinf(value) and "inf" not in node.value.lower()):
            raise ValueError
    except (ValueError, LookupError) as error:
        size = " of at most 64 bits" if numeric else ""
        problem = f"'{brief(hide(node.value))}' is no {kind}{size}: put quotation marks around text"
        raise BadValue(problem=problem, problem_mark=node.start_mark) from error
    return value


def _parse(text: str, document: Document) -> Any:
    """The value that ``text`` holds; places, and mistakes that leave the rest readable, go into ``document``.

    Raises:
        yaml.YAMLError: it cannot be read.
    """
    check_size(text, _Loader(text))
    loader = _Loader(text)
    node = loader.get_single_node()
    return None if node is None else _Builder(loader, document).build(node, ())


def read(path: str | Path) -> Document:
    """Read a YAML file. Raises ``ConfigError`` where it cannot be read at all; other mistakes are collected."""
    name = str(path)
    document = Document({}, name, {(): Place(f"{name}:1", 1)})
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_BYTES + 1).decode("utf-8-sig")
    except OSError as error:
        raise ConfigError([Mistake(name, "", f"cannot be read: {error.strerror}")]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([Mistake(name, "", f"is not UTF-8 text (byte {error.start})")]) from error
    try:
        data = _parse(text, document)
    except yaml.YAMLError as error:
        raise ConfigError([_syntax(name, error)]) from error
    if isinstance(data, dict):
        document.data = data
    elif data is not None:
        raise ConfigError([Mistake(name, "", "must hold settings (key: value), not plain text or a list")])
    return document


def _syntax(name: str, error: yaml.YAMLError) -> Mistake:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    return Mistake(f"{name}:{mark.line + 1}" if mark else name, "", syntax_reason(error))


def syntax_reason(error: yaml.YAMLError) -> str:
    """What is wrong with a text, as one sentence without its place."""
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    if isinstance(error, (TooLarge, BadValue)):
        return problem
    context = getattr(error, "context", None)
    return f"is not valid YAML: {problem}{f' ({context})' if context else ''}"


def read_value(text: str) -> Any:
    """The value of an override: a scalar with its YAML type, or a list, mapping or quoted text in flow style.

    Raises ``yaml.YAMLError`` for an unclosed list or mapping, and what is too large or twice in one.
    """
    stripped = text.strip()
    if stripped in ("", "None"):
        return None
    if stripped[0] in "[{":
        document = Document({})
        value = _parse(stripped, document)
        for mistake in document.mistakes:
            raise BadValue(problem=f"{mistake.key}: {mistake.reason}".removeprefix(": "))
        return value
    if stripped[0] in "\"'":
        try:
            value = _parse(stripped, Document({}))
        except yaml.YAMLError:
            return text  # a quotation mark that opens no quoted text is text
        return value if isinstance(value, str) else text
    loader = _Loader("")
    tag = loader.resolve(yaml.ScalarNode, stripped, (True, False))
    if tag not in _SCALARS:
        return text
    return _scalar(loader, yaml.ScalarNode(tag, stripped if tag != f"{_CORE}str" else text))


def leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Every scalar below ``value`` with its path."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield path, value
    else:
        for key, item in items:
            yield from leaves(item, (*path, key))
