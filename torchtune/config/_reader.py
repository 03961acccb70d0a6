"""Read YAML into plain values, with the file and line of every key."""

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from torchtune.config._errors import MAX_MISTAKES, ConfigError, KeyPath, Mistake, join_key, truncate_text
from torchtune.config._secrets import redact_secrets


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML loader with two rules of YAML 1.2: ``2e-5`` and ``1e5`` are floats, dates are text."""


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
# Limits of a file; the largest shipped config has about a hundred values. Aliases are expanded.
_MAX_DEPTH = 64
_MAX_BYTES, _MAX_VALUES = 2**20, 20_000


class BadValue(yaml.MarkedYAMLError):
    """Value that is valid YAML, but not valid in a config."""


@dataclass(frozen=True)
class Place:
    """Source position of a value; ``raw`` is its text if it comes from the command line."""

    text: str
    line: int = 0
    raw: str | None = None


@dataclass
class Document:
    """Config as plain dicts, lists and scalars, with the source position of every key path."""

    data: dict[str, Any]
    name: str = ""
    places: dict[KeyPath, Place] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)
    count: int = 0  # all mistakes, including mistakes beyond the limit of ``mistakes``
    # Values that depend on ${oc.env:…}, directly or through references: the text as written, and the value
    environment: dict[KeyPath, tuple[str, Any]] = field(default_factory=dict)

    def place(self, path: KeyPath) -> Place:
        """Return the position of ``path``, or of the nearest enclosing section with a position."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.places:
                return self.places[path[:end]]
        return Place(self.name)

    def add(self, path: KeyPath, reason: str, at: KeyPath | None = None) -> None:
        """Add a mistake, with secrets redacted; ``at`` is the key to point to, by default ``path``."""
        self.count += 1
        place = self.place(path if at is None else at)
        mistake = Mistake(
            place.text, redact_secrets(truncate_text(join_key(path), 200)), redact_secrets(reason)[:2000], place.line
        )
        if mistake not in self.mistakes and len(self.mistakes) < MAX_MISTAKES:
            self.mistakes.append(mistake)

    def check(self) -> None:
        """Raise ``ConfigError`` with every mistake, sorted by line."""
        if self.mistakes:
            raise ConfigError(sorted(self.mistakes, key=lambda mistake: mistake.order))

    def set(self, path: KeyPath, value: Any, place: Place) -> None:
        """Set the value at ``path`` and drop the positions below it. The parent must exist."""
        parent = functools.reduce(lambda node, key: node[key], path[:-1], self.data)
        parent[path[-1]] = value
        self.drop_places(path)
        self.places[path] = place

    def drop_places(self, path: KeyPath) -> None:
        """Drop the positions of ``path`` and of everything below it."""
        for known in [known for known in self.places if known[: len(path)] == path]:
            del self.places[known]


class _Builder:
    """Converter of one file's YAML nodes to values; records positions and duplicate keys."""

    def __init__(self, loader: _Loader, document: Document) -> None:
        self.loader, self.document, self.open = loader, document, set()
        self.count = 0

    def build(self, node: yaml.Node, path: KeyPath) -> Any:
        if node in self.open:
            self.document.add(path, "contains itself through a YAML alias")
            return None
        self.count += 1
        if self.count > _MAX_VALUES:
            raise BadValue(problem=f"holds more than {_MAX_VALUES:,} values", problem_mark=node.start_mark)
        if isinstance(node, yaml.ScalarNode):
            return _convert_scalar(self.loader, node)
        if node.tag not in (f"{_CORE}seq", f"{_CORE}map"):
            raise _unknown_tag_error(node)
        self.open.add(node)
        if isinstance(node, yaml.SequenceNode):
            value: Any = []
            for index, item in enumerate(node.value):
                self._record_place((*path, index), item)
                value.append(self.build(item, (*path, index)))
        else:
            value = self._build_mapping(node, path)
        self.open.discard(node)
        return value

    def _record_place(self, path: KeyPath, node: yaml.Node) -> None:
        line = node.start_mark.line + 1
        self.document.places[path] = Place(f"{self.document.name}:{line}", line)

    def _build_mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[Any, Any]:
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
            key = _convert_scalar(self.loader, key_node)
            key = key if isinstance(key, int) and not isinstance(key, bool) and path else key_node.value
            full = (*path, key)
            if key in value:
                first = self.document.places[full].text.rpartition(":")[2]
                self._record_place(full, key_node)
                self.document.add(full, f"is given twice, first in line {first}: remove one")
                continue
            self._record_place(full, key_node)
            value[key] = self.build(item, full)
        return {**merged, **value}


def _unknown_tag_error(node: yaml.Node) -> yaml.YAMLError:
    tag = truncate_text(node.tag.replace(_CORE, "!!"))
    problem = f"could not determine a constructor for the tag '{tag}': a config holds plain values only"
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _convert_scalar(loader: _Loader, node: yaml.ScalarNode) -> Any:
    """Convert a scalar of a plain type. Raises ``BadValue`` if a number does not fit 64 bits."""
    if node.tag not in _SCALARS:
        raise _unknown_tag_error(node)
    kind = node.tag.removeprefix(_CORE)
    try:
        value = loader.construct_object(node)
        if kind == "int" and abs(value) >= 2**63:
            raise ValueError
        if kind == "float" and math.isinf(value) and "inf" not in node.value.lower():
            raise ValueError
    except (ValueError, LookupError) as error:
        text, size = truncate_text(redact_secrets(node.value)), " of at most 64 bits" * (kind in ("int", "float"))
        problem = f"'{text}' is no {kind}{size}: put quotation marks around text"
        raise BadValue(problem=problem, problem_mark=node.start_mark) from error
    return value


def _check_depth(text: str) -> None:
    """Raise ``BadValue`` for deep nesting: events are parsed without recursion, but composing nodes recurses in C."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise BadValue(problem=f"nests more than {_MAX_DEPTH} levels deep", problem_mark=event.start_mark)


def _parse(text: str, document: Document) -> Any:
    """Parse ``text``; positions and recoverable mistakes are added to ``document``.

    Raises:
        yaml.YAMLError: it cannot be parsed.
    """
    _check_depth(text)
    loader = _Loader(text)
    node = loader.get_single_node()
    return None if node is None else _Builder(loader, document).build(node, ())


def read_document(path: str | Path) -> Document:
    """Read a YAML file. Raises ``ConfigError`` if it cannot be parsed; other mistakes are collected in the document."""
    name = str(path)
    document = Document({}, name, {(): Place(f"{name}:1", 1)})
    try:
        with open(path, "rb") as file:
            content = file.read(_MAX_BYTES + 1)
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError([Mistake(name, "", f"cannot be read: {error.strerror}")]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([Mistake(name, "", f"is not UTF-8 text (byte {error.start})")]) from error
    if len(content) > _MAX_BYTES:
        raise ConfigError([Mistake(name, "", "is longer than 1 MiB: a config is a page of settings")])
    try:
        data = _parse(text, document)
    except yaml.YAMLError as error:
        raise ConfigError([_syntax_mistake(name, error)]) from error
    if isinstance(data, dict):
        document.data = data
    elif data is not None:
        raise ConfigError([Mistake(name, "", "must hold settings (key: value), not plain text or a list")])
    return document


def _syntax_mistake(name: str, error: yaml.YAMLError) -> Mistake:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    return Mistake(f"{name}:{mark.line + 1}" if mark else name, "", syntax_reason(error))


def syntax_reason(error: yaml.YAMLError) -> str:
    """Return the reason of a YAML error as one sentence without its position."""
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    if isinstance(error, BadValue):
        return problem
    context = getattr(error, "context", None)
    return f"is not valid YAML: {problem}{f' ({context})' if context else ''}"


def read_value(text: str) -> Any:
    """Parse the value of an override: a scalar with its YAML type, or a list, mapping or quoted text in flow style.

    Raises ``yaml.YAMLError`` for an unclosed list or mapping, or a duplicate key.
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
            return text  # no closing quotation mark: plain text
        return value if isinstance(value, str) else text
    loader = _Loader("")
    tag = loader.resolve(yaml.ScalarNode, stripped, (True, False))
    if tag not in _SCALARS:
        return text
    return _convert_scalar(loader, yaml.ScalarNode(tag, stripped if tag != f"{_CORE}str" else text))


def iter_scalars(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield every scalar below ``value`` with its path."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield path, value
    else:
        for key, item in items:
            yield from iter_scalars(item, (*path, key))
