"""Resolve references between settings, ``${key}``; errors name the file and line."""

import functools
import re
from collections.abc import Iterator
from typing import Any

from torchtune.config._errors import KeyPath, did_you_mean, join_key, truncate_text
from torchtune.config._limits import MAX_DEPTH
from torchtune.config._reader import Document, iter_scalars
from torchtune.config._secrets import escape, remember_environment

UNRESOLVED = "\0"  # value of a reference that could not be resolved; the checks skip it
# Limits over all references of a config: total characters (a list item counts 200 and more), and their number.
MAX_RESOLVED, MAX_REFERENCES, MAX_TEXT, MAX_CHAIN = 2**18, 1000, 10_000, 50
_REFERENCE = re.compile(r"\$\{\s*(\.*[\w.\-]+)\s*\}")
_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
_ENVIRONMENT = re.compile(r"\s*oc\.env\s*:")
_TAKES_NAMES = re.compile(r"\s*oc\.(select|deprecated|dict\.\w+)\s*:")  # takes setting names, not only values
_DECODES = "oc.decode"
_NESTED = "\1"  # stands for a nested reference inside a name


class _Unresolvable(Exception):
    """A reference that has no value; the message is the reason."""


def _find_references(text: str, path: KeyPath) -> tuple[list[tuple[str, ...]], bool]:
    """Return the names that ``text``, at ``path``, refers to, and whether it reads the environment.

    The names may be a superset.
    """
    # oc.decode may produce further references
    text = text.replace("\\", "") if _DECODES in text else text.replace("\\\\", "").replace("\\${", "")
    names, environment = [], False
    for _ in range(MAX_DEPTH):
        found = _INNERMOST.findall(text)
        if not found:
            break
        for content in found:
            if _ENVIRONMENT.match(content):
                environment = True
                continue
            resolver = re.match(r"\s*[\w.\-]+\s*:", content)
            content = content[resolver.end() if resolver else 0 :]
            if resolver and not _TAKES_NAMES.match(resolver[0]):
                content = content.replace(_NESTED, " ")
            for name in re.findall(rf"\.*[\w\-{_NESTED}][\w.\-\[\]{_NESTED}]*", content):
                dots = len(name) - len(name.lstrip("."))
                parts = tuple(part for part in re.split(r"[.\[\]]+", name) if part)
                names.append((*map(str, path[: len(path) - dots]), *parts) if dots else parts)
        text = _INNERMOST.sub(_NESTED, text)
    return names, environment


class _References:
    """References between the texts of a config, sorted so that each comes after the texts that it refers to."""

    def __init__(self, texts: dict[KeyPath, str]) -> None:
        self.texts = {tuple(map(str, path)): (path, text) for path, text in texts.items()}
        self.found = {key: _find_references(text, path) for key, (path, text) in self.texts.items()}
        self.from_environment: set[KeyPath] = set()
        self.refused: dict[KeyPath, str] = {}
        self._below: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
        for key in self.texts:
            for end in range(len(key) + 1):
                self._below.setdefault(key[:end], []).append(key)

    def targets(self, name: tuple[str, ...]) -> list[tuple[str, ...]]:
        """Return the texts that the value of ``name`` depends on: its own, those of its parents and of its children."""
        for index, part in enumerate(name):
            if _NESTED in part:  # any name with this prefix
                start = part.partition(_NESTED)[0]
                return [key for key in self._below.get(name[:index], ()) if "".join(key[index:]).startswith(start)]
        around = [name[:end] for end in range(1, len(name)) if name[:end] in self.texts]
        return around + self._below.get(name, [])

    def in_dependency_order(self) -> Iterator[KeyPath]:
        """Yield every path once, after those that it refers to; record cycles and long chains in ``refused``."""
        done: set[tuple[str, ...]] = set()
        for start in self.texts:
            stack = [(start, iter(self._dependencies(start)))] if start not in done else []
            while stack:
                key, needs = stack[-1]
                need = next((need for need in needs if need not in done), None)
                if need is None:
                    stack.pop()
                    done.add(key)
                    path = self.texts[key][0]
                    if self.found[key][1] or any(
                        self.texts[n][0] in self.from_environment for n in self._dependencies(key)
                    ):
                        self.from_environment.add(path)
                    yield path
                elif any(need == other for other, _ in stack):
                    self.refused[self.texts[key][0]] = "it refers to itself"
                elif len(stack) >= MAX_CHAIN:
                    self.refused[self.texts[key][0]] = f"more than {MAX_CHAIN} settings refer to one another in a row"
                    done.add(need)
                else:
                    stack.append((need, iter(self._dependencies(need))))

    def _dependencies(self, key: tuple[str, ...]) -> list[tuple[str, ...]]:
        return list(dict.fromkeys(target for name in self.found[key][0] for target in self.targets(name)))


def texts_with_references(data: Any) -> dict[KeyPath, str]:
    """Return every text below ``data`` that contains ``${``, by path."""
    return {path: text for path, text in iter_scalars(data) if isinstance(text, str) and "${" in text}


def texts_from_environment(data: Any) -> dict[KeyPath, str]:
    """Return the texts in ``data`` that depend on ``${oc.env:…}``, directly or through other references."""
    references = _References(texts_with_references(data))
    paths = list(references.in_dependency_order())
    return {path: references.texts[tuple(map(str, path))][1] for path in paths if path in references.from_environment}


class _Resolver:
    """Resolver that handles texts in dependency order and limits the total size of the result."""

    def __init__(self, data: dict[str, Any], texts: dict[KeyPath, str]) -> None:
        from omegaconf import OmegaConf

        self.references = _References(texts)
        self.config = OmegaConf.create(data)
        self.plain = data
        self.total_size = 0
        self._values: dict[tuple[str, ...], Any] = {}

    def resolve(self, path: KeyPath, text: str) -> Any:
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        if path in self.references.refused:
            raise _Unresolvable(self.references.refused[path])
        names, _ = self.references.found[tuple(map(str, path))]
        self._add_size(sum(map(self._current_size, names)))
        if _DECODES in text and any("${" in str(self._values.get(name, "")) for name in names):
            raise _Unresolvable("oc.decode takes no text that holds further references")
        try:
            value = _parent_of(self.config, path)[path[-1]]
            value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except OmegaConfBaseException as error:
            deep = "recursion depth" in str(error)
            raise _Unresolvable("it nests too deep" if deep else str(error)) from error
        except RecursionError as error:
            raise _Unresolvable("it nests too deep") from error
        if len(path) + _depth(value) > MAX_DEPTH:
            raise _Unresolvable(f"it nests more than {MAX_DEPTH} levels deep")
        self._add_size(_size_of(value))
        _parent_of(self.config, path)[path[-1]] = escape(value)
        self._values[tuple(map(str, path))] = value
        return value

    def _add_size(self, amount: int) -> None:
        if self.total_size + amount > MAX_RESOLVED:
            raise _Unresolvable(f"what the references of this config stand for is longer than {MAX_RESOLVED:,}")
        self.total_size += amount

    def _current_size(self, name: tuple[str, ...]) -> int:
        """Return the size of the current value of ``name``, as ``_size_of`` counts."""
        if _NESTED in "".join(name):
            return max((self._current_size(key) for key in self.references.targets(name)), default=0)
        for end in range(len(name), 0, -1):
            if name[:end] in self._values:
                return _size_of(self._values[name[:end]])
        node: Any = self.plain
        for part in name:
            try:
                node = node[int(part)] if isinstance(node, list) else {str(k): v for k, v in node.items()}[part]
            except (LookupError, ValueError, AttributeError):
                return 0
        below = self.references.targets(name)
        return _size_of(node) + sum(_size_of(self._values[key]) for key in below if key in self._values)


def _size_of(value: Any) -> int:
    """Return the size for the limit: characters of a text, 200 and more for an item of a list or mapping."""
    if isinstance(value, (dict, list)):
        return sum(200 + len(path) + (len(leaf) if isinstance(leaf, str) else 0) for path, leaf in iter_scalars(value))
    return len(value) if isinstance(value, str) else 1


def _depth(value: Any) -> int:
    return max((len(path) for path, _ in iter_scalars(value)), default=0)


def interpolate(document: Document, defaults: dict[str, Any]) -> set[str]:
    """Replace every ``${…}`` in the document by its value.

    ``defaults`` can be referred to, but are not added to the document.

    Returns:
        The dotted names that are referred to.
    """
    written = texts_with_references(document.data)
    for path, text in list(written.items()):
        reason = _syntax_problem(text, len(written))
        if reason is not None:
            document.add(path, f"'{truncate_text(text)}' {reason}")
            _parent_of(document.data, path)[path[-1]] = UNRESOLVED
            del written[path]
    if not written:
        return set()
    remember_environment(written.values())
    names = [join_key(path[:end]) for path, _ in iter_scalars(document.data) for end in range(1, len(path) + 1)]
    resolver = _Resolver({**defaults, **document.data}, written)
    values: dict[KeyPath, Any] = {}
    for path in resolver.references.in_dependency_order():
        text = written[path]
        try:
            values[path] = resolver.resolve(path, text)
        except _Unresolvable as error:
            document.add(path, f"'{truncate_text(text)}' {_explain_error(str(error), [*names, *defaults])}")
            values[path] = UNRESOLVED
            _parent_of(resolver.config, path)[path[-1]] = ""
            continue
        whole = _REFERENCE.fullmatch(text)
        if whole and not whole[1].startswith("."):
            document.copies[path] = tuple(int(part) if part.isdigit() else part for part in whole[1].split("."))
    for path, resolved in values.items():
        _parent_of(document.data, path)[path[-1]] = resolved
        if path in resolver.references.from_environment and resolved != UNRESOLVED:
            document.environment[path] = (written[path], resolved)
    return {name for text in written.values() for name in _REFERENCE.findall(text)}


def _syntax_problem(text: str, count: int) -> str | None:
    """Return the reason why a text is invalid, without looking at other settings, or ``None``."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if len(text) > MAX_TEXT or count > MAX_REFERENCES or text.count("${") > MAX_REFERENCES:
        return f"is too much: a config has at most {MAX_REFERENCES:,} texts with ${{…}}, of {MAX_TEXT:,} letters each"
    try:
        OmegaConf.create({"value": text})
    except (OmegaConfBaseException, RecursionError):
        return "is not a valid interpolation: write ${key} or ${section.key}"
    return None


def _parent_of(tree: Any, path: KeyPath) -> Any:
    """Return the container of the last key of ``path``."""
    return functools.reduce(lambda node, key: node[key], path[:-1], tree)


def _explain_error(error: str, names: list[str]) -> str:
    missing = re.search(r"Interpolation key '([^']*)' not found", error)
    if missing:
        return f"refers to '{missing[1]}', which does not exist{did_you_mean(missing[1], names)}"
    return f"cannot be resolved: {error.partition(chr(10))[0].rpartition('resolving interpolation: ')[2]}"
