"""References between settings: ``${key}``, resolved with the place of every one that fails."""

import functools
import re
from collections.abc import Iterator
from typing import Any

from torchtune.config._errors import KeyPath, brief, did_you_mean, dotted
from torchtune.config._limits import MAX_DEPTH
from torchtune.config._reader import Document, leaves
from torchtune.config._secrets import escape, remember_environment

UNRESOLVED = "\0"  # what stands where a reference failed; the checks pass over it
# Characters that all references of a config may make together (an item of a list is as much as 200), and their number.
MAX_RESOLVED, MAX_REFERENCES, MAX_TEXT, MAX_CHAIN = 2**18, 1000, 10_000, 50
_REFERENCE = re.compile(r"\$\{\s*(\.*[\w.\-]+)\s*\}")
_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
_ENVIRONMENT = re.compile(r"\s*oc\.env\s*:")
_LOOKS_UP = re.compile(r"\s*oc\.(select|deprecated|dict\.\w+)\s*:")  # takes names of settings, not only values
_DECODES = "oc.decode"
_ANY = "\1"  # placeholder of a nested reference, part of the name


class _Unresolvable(Exception):
    """Why a reference has no value."""


def _names(text: str, path: KeyPath) -> tuple[list[tuple[str, ...]], bool]:
    """What ``text``, at ``path``, refers to, and whether it reads the environment. Too much rather than too little."""
    # What oc.decode decodes may be references again
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
            if resolver and not _LOOKS_UP.match(resolver[0]):
                content = content.replace(_ANY, " ")
            for name in re.findall(rf"\.*[\w\-{_ANY}][\w.\-\[\]{_ANY}]*", content):
                dots = len(name) - len(name.lstrip("."))
                parts = tuple(part for part in re.split(r"[.\[\]]+", name) if part)
                names.append((*map(str, path[: len(path) - dots]), *parts) if dots else parts)
        text = _INNERMOST.sub(_ANY, text)
    return names, environment


class _References:
    """The references between the texts of a config, in an order in which each refers to what is resolved already."""

    def __init__(self, texts: dict[KeyPath, str]) -> None:
        self.texts = {tuple(map(str, path)): (path, text) for path, text in texts.items()}
        self.found = {key: _names(text, path) for key, (path, text) in self.texts.items()}
        self.from_environment: set[KeyPath] = set()
        self.refused: dict[KeyPath, str] = {}
        self._below: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
        for key in self.texts:
            for end in range(len(key) + 1):
                self._below.setdefault(key[:end], []).append(key)

    def targets(self, name: tuple[str, ...]) -> list[tuple[str, ...]]:
        """The texts that the value of ``name`` depends on: at it, around it and below it."""
        for index, part in enumerate(name):
            if _ANY in part:  # any name that begins so
                start = part.partition(_ANY)[0]
                return [key for key in self._below.get(name[:index], ()) if "".join(key[index:]).startswith(start)]
        around = [name[:end] for end in range(1, len(name)) if name[:end] in self.texts]
        return around + self._below.get(name, [])

    def order(self) -> Iterator[KeyPath]:
        """Every path once, after those that it refers to; what cannot be in any order is in ``refused``."""
        done: set[tuple[str, ...]] = set()
        for start in self.texts:
            stack = [(start, iter(self._needs(start)))] if start not in done else []
            while stack:
                key, needs = stack[-1]
                need = next((need for need in needs if need not in done), None)
                if need is None:
                    stack.pop()
                    done.add(key)
                    path = self.texts[key][0]
                    if self.found[key][1] or any(self.texts[n][0] in self.from_environment for n in self._needs(key)):
                        self.from_environment.add(path)
                    yield path
                elif any(need == other for other, _ in stack):
                    self.refused[self.texts[key][0]] = "it refers to itself"
                elif len(stack) >= MAX_CHAIN:
                    self.refused[self.texts[key][0]] = f"more than {MAX_CHAIN} settings refer to one another in a row"
                    done.add(need)
                else:
                    stack.append((need, iter(self._needs(need))))

    def _needs(self, key: tuple[str, ...]) -> list[tuple[str, ...]]:
        return list(dict.fromkeys(target for name in self.found[key][0] for target in self.targets(name)))


def texts_with_references(data: Any) -> dict[KeyPath, str]:
    """Every text below ``data`` that has a ``${``."""
    return {path: text for path, text in leaves(data) if isinstance(text, str) and "${" in text}


def texts_from_environment(data: Any) -> dict[KeyPath, str]:
    """The texts in ``data`` with a value from ``${oc.env:…}``, directly or through other references."""
    references = _References(texts_with_references(data))
    paths = list(references.order())
    return {path: references.texts[tuple(map(str, path))][1] for path in paths if path in references.from_environment}


class _Resolver:
    """Resolves one text after another, each from resolved values, and counts what comes out."""

    def __init__(self, data: dict[str, Any], texts: dict[KeyPath, str]) -> None:
        from omegaconf import OmegaConf

        self.references = _References(texts)
        self.config = OmegaConf.create(data)
        self.plain = data
        self.made = 0
        self._values: dict[tuple[str, ...], Any] = {}

    def resolve(self, path: KeyPath, text: str) -> Any:
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        if path in self.references.refused:
            raise _Unresolvable(self.references.refused[path])
        names, _ = self.references.found[tuple(map(str, path))]
        self._count(sum(map(self._size, names)))
        if _DECODES in text and any("${" in str(self._values.get(name, "")) for name in names):
            raise _Unresolvable("oc.decode takes no text that holds further references")
        try:
            value = _inside(self.config, path)[path[-1]]
            value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except OmegaConfBaseException as error:
            deep = "recursion depth" in str(error)
            raise _Unresolvable("it nests too deep" if deep else str(error)) from error
        except RecursionError as error:
            raise _Unresolvable("it nests too deep") from error
        if len(path) + _depth(value) > MAX_DEPTH:
            raise _Unresolvable(f"it nests more than {MAX_DEPTH} levels deep")
        self._count(_amount(value))
        _inside(self.config, path)[path[-1]] = escape(value)
        self._values[tuple(map(str, path))] = value
        return value

    def _count(self, amount: int) -> None:
        if self.made + amount > MAX_RESOLVED:
            raise _Unresolvable(f"what the references of this config stand for is longer than {MAX_RESOLVED:,}")
        self.made += amount

    def _size(self, name: tuple[str, ...]) -> int:
        """Of what ``name`` stands for now."""
        if _ANY in "".join(name):
            return max((self._size(key) for key in self.references.targets(name)), default=0)
        for end in range(len(name), 0, -1):
            if name[:end] in self._values:
                return _amount(self._values[name[:end]])
        node: Any = self.plain
        for part in name:
            try:
                node = node[int(part)] if isinstance(node, list) else {str(k): v for k, v in node.items()}[part]
            except (LookupError, ValueError, AttributeError):
                return 0
        below = self.references.targets(name)
        return _amount(node) + sum(_amount(self._values[key]) for key in below if key in self._values)


def _amount(value: Any) -> int:
    """What ``value`` counts."""
    if isinstance(value, (dict, list)):
        return sum(200 + len(path) + (len(leaf) if isinstance(leaf, str) else 0) for path, leaf in leaves(value))
    return len(value) if isinstance(value, str) else 1


def _depth(value: Any) -> int:
    return max((len(path) for path, _ in leaves(value)), default=0)


def interpolate(document: Document, defaults: dict[str, Any]) -> set[str]:
    """Replace every ``${…}`` by its value; ``defaults`` are seen by references, but stay out of the document.

    Returns the dotted names that are referred to.
    """
    written = texts_with_references(document.data)
    for path, text in list(written.items()):
        reason = _malformed(text, len(written))
        if reason is not None:
            document.add(path, f"'{brief(text)}' {reason}")
            _inside(document.data, path)[path[-1]] = UNRESOLVED
            del written[path]
    if not written:
        return set()
    remember_environment(written.values())
    names = [dotted(path[:end]) for path, _ in leaves(document.data) for end in range(1, len(path) + 1)]
    resolver = _Resolver({**defaults, **document.data}, written)
    values: dict[KeyPath, Any] = {}
    for path in resolver.references.order():
        text = written[path]
        try:
            values[path] = resolver.resolve(path, text)
        except _Unresolvable as error:
            document.add(path, f"'{brief(text)}' {_reason(str(error), [*names, *defaults])}")
            values[path] = UNRESOLVED
            _inside(resolver.config, path)[path[-1]] = ""
            continue
        whole = _REFERENCE.fullmatch(text)
        if whole and not whole[1].startswith("."):
            document.copies[path] = tuple(int(part) if part.isdigit() else part for part in whole[1].split("."))
    for path, resolved in values.items():
        _inside(document.data, path)[path[-1]] = resolved
        if path in resolver.references.from_environment and resolved != UNRESOLVED:
            document.environment[path] = (written[path], resolved)
    return {name for text in written.values() for name in _REFERENCE.findall(text)}


def _malformed(text: str, count: int) -> str | None:
    """What is wrong with a text by itself."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if len(text) > MAX_TEXT or count > MAX_REFERENCES or text.count("${") > MAX_REFERENCES:
        return f"is too much: a config has at most {MAX_REFERENCES:,} texts with ${{…}}, of {MAX_TEXT:,} letters each"
    try:
        OmegaConf.create({"value": text})
    except (OmegaConfBaseException, RecursionError):
        return "is not a valid interpolation: write ${key} or ${section.key}"
    return None


def _inside(tree: Any, path: KeyPath) -> Any:
    """What holds the last key of ``path``."""
    return functools.reduce(lambda node, key: node[key], path[:-1], tree)


def _reason(error: str, names: list[str]) -> str:
    missing = re.search(r"Interpolation key '([^']*)' not found", error)
    if missing:
        return f"refers to '{missing[1]}', which does not exist{did_you_mean(missing[1], names)}"
    return f"cannot be resolved: {error.partition(chr(10))[0].rpartition('resolving interpolation: ')[2]}"
