"""Read a config: YAML as plain values with the file and line of every key, and the overrides of a command line.

References (``${key}``) are texts here; :func:`torchtune.config._references.interpolate` replaces them.
"""

import functools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from torchtune.config._errors import (
    MAX_MISTAKES,
    ConfigError,
    KeyPath,
    Mistake,
    did_you_mean,
    join_key,
    truncate_text,
)
from torchtune.config._secrets import REDACTED, environment_reference, is_secret, redact_secrets


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML loader with two rules of YAML 1.2: ``2e-5`` and ``1e5`` are floats, dates are text."""


_FLOAT = re.compile(
    r"""^(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+
    |[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$""",
    re.VERBOSE,
)
_CORE = "tag:yaml.org,2002:"  # prefix of the tags of YAML's own types
_SCALARS = {f"{_CORE}{name}" for name in ("str", "int", "float", "bool", "null")}

# PyYAML looks up the patterns of plain scalars by their first character. The rows of floats are replaced, and the rows
# of dates are removed.
_Loader.yaml_implicit_resolvers = {}
_REPLACED = (f"{_CORE}float", f"{_CORE}timestamp")
for _character, _rows in yaml.SafeLoader.yaml_implicit_resolvers.items():
    _Loader.yaml_implicit_resolvers[_character] = [(tag, pattern) for tag, pattern in _rows if tag not in _REPLACED]
_Loader.add_implicit_resolver(f"{_CORE}float", _FLOAT, list("-+0123456789."))

# Limits of a file; the largest shipped config has about a hundred values. Aliases are expanded.
_MAX_DEPTH = 64
_MAX_BYTES = 2**20
_MAX_VALUES = 20_000

COMMAND_LINE = "command line"  # stands for the file and line of an override
_FIRST_OVERRIDE_LINE = 10**9  # line number, so that command-line mistakes are sorted after mistakes of the file


class BadValue(yaml.MarkedYAMLError):
    """Value that is valid YAML, but not valid in a config."""


@dataclass(frozen=True)
class Position:
    """Source position of a value; ``raw`` is its text if it comes from the command line."""

    text: str
    line: int = 0
    raw: str | None = None


@dataclass
class Document:
    """Config as plain dicts, lists and scalars, with the source position of every key path.

    Attributes:
        data: settings by name.
        name: file of the config, for messages.
        positions: source position by key path.
        mistakes: the first mistakes, which :meth:`check` raises together.

    Example:
        >>> document = torchtune.config.Document({"optimizer": {"lr": 0.1}})
        >>> torchtune.config.apply_overrides(document, ["optimizer.lr=1e-4", "epochs=2"])
        >>> document.data
        {'optimizer': {'lr': 0.0001}, 'epochs': 2}
    """

    data: dict[str, Any]
    name: str = ""
    positions: dict[KeyPath, Position] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)
    count: int = 0  # all mistakes, including mistakes beyond the limit of ``mistakes``
    # Values that depend on ${oc.env:…}, directly or through references: the text as written, and the value
    environment: dict[KeyPath, tuple[str, Any]] = field(default_factory=dict)

    def position(self, path: KeyPath) -> Position:
        """Return the position of ``path``, or of the nearest enclosing section with a position."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.positions:
                return self.positions[path[:end]]
        return Position(self.name)

    def add_mistake(self, path: KeyPath, reason: str, at: KeyPath | None = None) -> None:
        """Add a mistake, with secrets redacted; ``at`` is the key to point to, by default ``path``."""
        self.count += 1
        if at is None:
            at = path
        position = self.position(at)
        key = redact_secrets(truncate_text(join_key(path), 200))
        mistake = Mistake(position.text, key, redact_secrets(reason)[:2000], position.line)
        if mistake not in self.mistakes and len(self.mistakes) < MAX_MISTAKES:
            self.mistakes.append(mistake)

    def check(self) -> None:
        """Raise ``ConfigError`` with every mistake, sorted by line."""
        if self.mistakes:
            raise ConfigError(sorted(self.mistakes, key=lambda mistake: mistake.order))

    def set(self, path: KeyPath, value: Any, position: Position) -> None:
        """Set the value at ``path`` and drop the positions below it. The parent must exist."""
        parent_of(self.data, path)[path[-1]] = value
        self.drop_positions(path)
        self.positions[path] = position

    def drop_positions(self, path: KeyPath) -> None:
        """Drop the positions of ``path`` and of everything below it."""
        for key_path in list(self.positions):
            if key_path[: len(path)] == path:
                del self.positions[key_path]


class _Builder:
    """Converter of one file's YAML nodes to values; records positions and duplicate keys."""

    def __init__(self, loader: _Loader, document: Document) -> None:
        self.loader = loader
        self.document = document
        self.ancestors: set[yaml.Node] = set()  # collections around the current node
        self.count = 0

    def build(self, node: yaml.Node, path: KeyPath) -> Any:
        """Convert ``node``, which stands at ``path``."""
        if node in self.ancestors:
            self.document.add_mistake(path, "contains itself through a YAML alias")
            return None
        self.count += 1  # again for each alias of a node, because a short file of aliases can expand to any size
        if self.count > _MAX_VALUES:
            raise BadValue(problem=f"holds more than {_MAX_VALUES:,} values", problem_mark=node.start_mark)
        if isinstance(node, yaml.ScalarNode):
            return _convert_scalar(self.loader, node)
        if node.tag not in (f"{_CORE}seq", f"{_CORE}map"):
            raise _unknown_tag_error(node)
        self.ancestors.add(node)
        if isinstance(node, yaml.SequenceNode):
            value: Any = []
            for index, item in enumerate(node.value):
                self._record_position((*path, index), item)
                value.append(self.build(item, (*path, index)))
        else:
            value = self._build_mapping(node, path)
        self.ancestors.discard(node)  # beside this place, an alias of the node is valid
        return value

    def _record_position(self, path: KeyPath, node: yaml.Node) -> None:
        """Record the file and line of a node."""
        line = node.start_mark.line + 1
        self.document.positions[path] = Position(f"{self.document.name}:{line}", line)

    def _build_mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[Any, Any]:
        """Convert a mapping; a key that cannot be one, or is given twice, is a mistake, and is left out."""
        value: dict[Any, Any] = {}
        merged: dict[Any, Any] = {}
        for key_node, item in node.value:
            if key_node.tag == f"{_CORE}merge":  # <<: *defaults, or a list of them; earlier ones win
                sources = [item]
                if isinstance(item, yaml.SequenceNode):
                    sources = item.value
                for source in sources:
                    defaults = self.build(source, path)
                    if isinstance(defaults, dict):
                        merged = {**defaults, **merged}
                continue
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag.endswith(":null"):
                self.document.add_mistake(path, "has a key that is not a plain name")
                continue
            # Names of settings are text. Inside a section, an integer stays one: a mapping may have ids as keys.
            key = _convert_scalar(self.loader, key_node)
            if type(key) is not int or not path:
                key = key_node.value
            key_path = (*path, key)
            if key in value:
                first_line = self.document.positions[key_path].line
                self._record_position(key_path, key_node)
                self.document.add_mistake(key_path, f"is given twice, first in line {first_line}: remove one")
                continue
            self._record_position(key_path, key_node)
            value[key] = self.build(item, key_path)
        # Keys of the mapping itself win over those of `<<`.
        return {**merged, **value}


def _unknown_tag_error(node: yaml.Node) -> yaml.YAMLError:
    """Return the error for a tag that YAML has no plain value for, such as ``!!python/object``."""
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
        if kind == "float" and math.isinf(value) and "inf" not in node.value.lower():  # 1e999
            raise ValueError
    except (ValueError, LookupError) as error:
        text = truncate_text(redact_secrets(node.value))
        if kind in ("int", "float"):
            kind += " of at most 64 bits"
        problem = f"'{text}' is no {kind}: put quotation marks around text"
        raise BadValue(problem=problem, problem_mark=node.start_mark) from error
    return value


def _parse(text: str, document: Document) -> Any:
    """Parse ``text``; positions and recoverable mistakes are added to ``document``.

    Raises:
        yaml.YAMLError: it cannot be parsed.
    """
    # Deep nesting is refused first: events are parsed without recursion, but composing nodes recurses in C.
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > _MAX_DEPTH:
            raise BadValue(problem=f"nests more than {_MAX_DEPTH} levels deep", problem_mark=event.start_mark)
    loader = _Loader(text)
    node = loader.get_single_node()
    if node is None:  # an empty file
        return None
    return _Builder(loader, document).build(node, ())


def read_document(path: str | Path) -> Document:
    """Read a YAML file.

    Args:
        path: the file.

    Returns:
        The document, with the mistakes from which parsing recovered, such as duplicate keys.

    Raises:
        ConfigError: the file cannot be read or parsed.

    Example:
        >>> _ = (folder / "config.yaml").write_text("epochs: 2\\nepochs: 3")
        >>> document = torchtune.config.read_document(folder / "config.yaml")
        >>> document.data, document.mistakes[0].reason
        ({'epochs': 2}, 'is given twice, first in line 1: remove one')
    """
    name = str(path)
    document = Document({}, name, {(): Position(f"{name}:1", 1)})
    try:
        with open(path, "rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError([Mistake(name, "", f"cannot be read: {error.strerror}")]) from error
    # Before the text is decoded: a longer file may be cut within a character.
    if len(content) > _MAX_BYTES:
        raise ConfigError([Mistake(name, "", "is longer than 1 MiB: a config is a page of settings")])
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError([Mistake(name, "", f"is not UTF-8 text (byte {error.start})")]) from error
    try:
        data = _parse(text, document)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        position = name
        if mark:
            position += f":{mark.line + 1}"
        raise ConfigError([Mistake(position, "", syntax_reason(error))]) from error
    if isinstance(data, dict):
        document.data = data
    elif data is not None:
        raise ConfigError([Mistake(name, "", "must hold settings (key: value), not plain text or a list")])
    return document


def syntax_reason(error: yaml.YAMLError) -> str:
    """Return the reason of a YAML error as one sentence without its position."""
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    if isinstance(error, BadValue):
        return problem
    reason = f"is not valid YAML: {problem}"
    context = getattr(error, "context", None)
    if context:
        reason += f" ({context})"
    return reason


def read_value(text: str) -> Any:
    """Parse the value of an override: a scalar with its YAML type, or a list, mapping or quoted text in flow style.

    Nothing (``key=``) and Python's ``None`` are null. Any other text is returned as it is.
    Raises ``yaml.YAMLError`` for an unclosed list or mapping, or a duplicate key.
    """
    stripped = text.strip()
    if stripped in ("", "None"):
        return None
    if stripped[0] in "[{":
        document = Document({})
        value = _parse(stripped, document)
        if document.mistakes:
            mistake = document.mistakes[0]
            raise BadValue(problem=f"{mistake.key}: {mistake.reason}".removeprefix(": "))
        return value
    if stripped[0] in "\"'":
        try:
            value = _parse(stripped, Document({}))
        except yaml.YAMLError:
            return text  # no closing quotation mark: plain text
        if isinstance(value, str):
            return value
        return text  # a mapping whose first key is quoted: plain text, because a mapping needs braces here
    # The type that YAML gives a plain scalar: `(True, False)` says that it is plain, not quoted.
    loader = _Loader("")
    tag = loader.resolve(yaml.ScalarNode, stripped, (True, False))
    if tag not in _SCALARS or tag == f"{_CORE}str":
        return text
    return _convert_scalar(loader, yaml.ScalarNode(tag, stripped))


def parent_of(tree: Any, path: KeyPath) -> Any:
    """Return the container of the last key of ``path``."""
    return functools.reduce(lambda node, key: node[key], path[:-1], tree)


def iter_scalars(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield every scalar below ``value`` with its path."""
    if not isinstance(value, (dict, list)):
        yield path, value
        return
    for key, item in iter_items(value):
        yield from iter_scalars(item, (*path, key))


def iter_items(section: dict[Any, Any] | list[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the keys or indices of a mapping or list, with the values."""
    if isinstance(section, dict):
        yield from section.items()
    else:
        yield from enumerate(section)


def is_component(value: Any) -> bool:
    """Return whether ``value`` is a section with a ``_component_`` key."""
    return isinstance(value, dict) and "_component_" in value


def format_value(value: Any, path: KeyPath = ()) -> str:
    """Format a value for messages: ``'two' (str)``; secrets, detected by the keys in ``path``, are redacted."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if value is None:
        return "null"
    if any(is_secret(str(key), value) for key in path):
        text = REDACTED
    else:
        text = environment_reference(value) or truncate_text(redact_secrets(repr(value)))
    return f"{text} ({type(value).__name__})"


class _InvalidOverride(Exception):
    """Override that cannot be applied; the message is the reason."""


def apply_overrides(document: Document, overrides: Sequence[str]) -> None:
    """Apply overrides of a command line in order; each one that fails becomes a mistake of the document.

    Args:
        document: the config, which is changed.
        overrides: ``key=value``, or ``~key`` to remove a setting; ``a.b`` is a key inside the section ``a``.

    Example:
        >>> document = torchtune.config.Document({"optimizer": {"lr": 0.1, "fused": True}})
        >>> torchtune.config.apply_overrides(document, ["~optimizer.fused"])
        >>> document.data
        {'optimizer': {'lr': 0.1}}
    """
    for index, token in enumerate(overrides):
        position = Position(COMMAND_LINE, _FIRST_OVERRIDE_LINE + index, token.partition("=")[2])
        key, equals, text = token.removeprefix("~").partition("=")
        keys = key.split(".")
        try:
            if token.startswith("--"):
                raise _InvalidOverride("is not an option of a recipe: settings are written key=value")
            if not all(keys):
                raise _InvalidOverride("needs a key: write key=value or section.key=value")
            if token.startswith("~"):
                if equals:
                    raise _InvalidOverride("a removal takes no value: write ~key")
                _remove(document, keys)
            elif not equals:
                raise _InvalidOverride("is not of the form key=value" + did_you_mean(key, map(str, document.data)))
            else:
                _assign(document, keys, text, position)
        except _InvalidOverride as error:
            whole_key = (key or token,)  # in one piece, because it may not be a path of keys
            document.positions[whole_key] = position
            document.add_mistake(whole_key, str(error))


def _convert_key(node: Any, key: str, section_path: KeyPath) -> str | int:
    """Convert ``key`` to an index or key of ``node``, which stands at ``section_path``."""
    if isinstance(node, list):
        if not key.isdigit() or int(key) >= len(node):
            name = join_key(section_path)
            raise _InvalidOverride(f"{name} is a list of {len(node)}: write {name}.0 for its first item")
        return int(key)
    if not isinstance(node, dict):
        raise _InvalidOverride(f"{join_key(section_path)} is {format_value(node, section_path)}, not a section")
    if key.isdigit() and int(key) in node:
        return int(key)
    return key


def _assign(document: Document, keys: list[str], text: str, position: Position) -> None:
    """Set the value at ``keys`` to what ``text`` means in YAML; sections that do not exist are created."""
    try:
        if "max_filename" in keys[-1]:
            value = text  # of the settings that hold digits, it alone is text: its zeros count (00005)
        else:
            value = read_value(text)
    except BadValue as error:
        raise _InvalidOverride(syntax_reason(error)) from error
    except yaml.YAMLError as error:
        quoted = f"'{truncate_text(redact_secrets(text))}'"
        if is_secret(keys[-1]):
            quoted = REDACTED
        reason = f"{quoted} is not a complete list or mapping: put quotation marks around text"
        raise _InvalidOverride(reason) from error
    node: Any = document.data
    path: KeyPath = ()
    for key in keys[:-1]:
        step = _convert_key(node, key, path)
        path = (*path, step)
        if isinstance(node, dict) and node.get(step) is None:  # missing, or null
            document.set(path, {}, position)
        node = node[step]
    path = (*path, _convert_key(node, keys[-1], path))
    previous = node[path[-1]] if isinstance(node, list) else node.get(path[-1])
    # A reference may stand for a whole section.
    if is_component(previous) and isinstance(value, str) and "${" not in value:
        path = (*path, "_component_")  # model=package.builder keeps the other arguments
    document.set(path, value, position)


def _remove(document: Document, keys: list[str]) -> None:
    """Remove the value at ``keys``."""
    nodes: list[Any] = [document.data]
    path: KeyPath = ()
    for key in keys:
        step = _convert_key(nodes[-1], key, path)
        if isinstance(nodes[-1], dict) and step not in nodes[-1]:
            hint = did_you_mean(key, map(str, nodes[-1]))
            raise _InvalidOverride("cannot be removed: it is not in the config" + hint)
        path = (*path, step)
        nodes.append(nodes[-1][step])
    if path[-1] == "_component_":
        raise _InvalidOverride("cannot be removed: a component without a name is nothing; remove the whole section")
    # A section that becomes empty is removed, too; a list stays, because an empty list is a value.
    for end in range(len(path), 0, -1):
        section = nodes[end - 1]
        del section[path[end - 1]]
        document.drop_positions(path[:end])
        if section or not isinstance(section, dict):
            break
