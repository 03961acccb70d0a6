"""What prepared rows depend on, as one short text: the same text, the same rows."""

import functools
import glob
import hashlib
import importlib.metadata
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torchtune

# What makes tokens beside this library's own files.
_PACKAGES = ("datasets", "jinja2", "sentencepiece", "tiktoken", "tokenizers")
_ROOMS = ("data", "datasets", "modules/transforms")
_WHOLE = 1 << 28  # files of up to 256 MiB together are known by their content alone
_EDGE = 1 << 20


class Fingerprint:
    """Collects what rows depend on.

    Attributes:
        parts: name of what was added by name -> a digest, or the value itself where it is short.
        is_exact: everything was understood: rows of this fingerprint may be used again by another run.
        is_shared: the processes of this run see the same data, as far as can be told.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # ids are unique as long as the objects live
        self._sources: set[str] = set()
        self.parts: dict[str, str] = {}
        self.is_exact = self.is_shared = True

    @property
    def text(self) -> str:
        """64 hexadecimal digits."""
        total = self._hash.copy()
        total.update(self.code.encode())
        return total.hexdigest()

    @property
    def code(self) -> str:
        """Digest of the code that makes rows of what was added."""
        total = hashlib.sha256(_library().encode())
        for path in sorted(self._sources):
            total.update(Path(path).read_bytes())
        return total.hexdigest()

    def add_part(self, name: str, value: Any) -> None:
        """Add a value under a name, so that a difference can be told by it; objects of this library by attribute."""
        kind = type(value)
        is_own = kind.__module__.split(".")[0] == torchtune.__name__ and not isinstance(value, Enum | type)
        if (
            is_own
            and not hasattr(value, "fingerprint_parts")
            and not isinstance(getattr(value, "fingerprint", None), str)
        ):
            self._add_whole(name, kind)
            for attribute, inner in vars(value).items():
                self._add_whole(f"{name}.{attribute}", inner)
        else:
            self._add_whole(name, value)

    def _add_whole(self, name: str, value: Any) -> None:
        part = Fingerprint()
        part._seen, part._kept = self._seen, self._kept
        part.add(value)
        self.take(name, part)
        if value is None or (isinstance(value, bool | int | float | str) and len(str(value)) <= 80):
            self.parts[name] = repr(value)

    def take(self, name: str, part: "Fingerprint") -> None:
        """Add what another one has collected, under a name."""
        digest = part._hash.hexdigest()
        self._feed(name, digest)
        self.parts[name] = digest
        self._sources |= part._sources
        self.is_exact, self.is_shared = self.is_exact and part.is_exact, self.is_shared and part.is_shared

    def differences(self, then: Mapping[str, str]) -> list[str]:
        """What differs from the :attr:`parts` and the ``code`` of another one, in words."""
        now = {**self.parts, "code": self.code}
        found = []
        for name in dict.fromkeys([*now, *then]):
            before, after = then.get(name), now.get(name)
            if before != after:
                short = all(text is None or len(text) < 64 for text in (before, after))
                found.append(f"{name} (was {before}, now {after})" if short else name)
        return found

    def _feed(self, *texts: str) -> None:
        for text in texts:
            data = text.encode("utf-8", "surrogatepass")
            self._hash.update(len(data).to_bytes(8, "big") + data)

    def add(self, value: Any) -> None:
        """Add a value: plain data, or an object of this library and what it is made of.

        An object of somebody else's is taken by its attribute ``fingerprint``, a text that changes when it does;
        without one the fingerprint is not exact.
        """
        if value is None or isinstance(value, bool | int | float | str | bytes):
            self._feed(type(value).__name__, value if isinstance(value, str) else repr(value))
            return
        if id(value) in self._seen:
            self._feed("again", str(self._seen[id(value)]))
            return
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)
        if isinstance(value, Mapping):
            self._feed("mapping", str(len(value)))
            for key in sorted(value, key=repr):
                self.add(key)
                self.add(value[key])
        elif isinstance(value, list | tuple):
            self._feed("list", str(len(value)))
            for item in value:
                self.add(item)
        elif isinstance(value, set | frozenset):
            self.add(sorted(value, key=repr))
        elif isinstance(value, Enum):
            self._feed(type(value).__qualname__, value.name)
        elif isinstance(value, Path):
            self._feed("path", str(value))
        elif isinstance(value, re.Pattern):
            self._feed("pattern", str(value.pattern), str(value.flags))
        elif isinstance(value, functools.partial):
            self.add([value.func, value.args, value.keywords])
        elif isinstance(value, MethodType):
            self.add([value.__func__.__name__, value.__self__])
        else:
            self._add_object(value)

    def _add_object(self, value: Any) -> None:
        kind = value if isinstance(value, FunctionType | type) else type(value)
        module = str(kind.__module__)  # code that is run from a text has none
        self._feed(module, kind.__qualname__)
        name = f"{module}.{kind.__qualname__}"
        own = getattr(value, "fingerprint", None)
        if isinstance(own, str):
            self._feed(own)
        elif reader := _READERS.get(name):
            self.add(reader(value))
        elif module.split(".")[0] != torchtune.__name__ or "<" in kind.__qualname__:
            self.is_exact = False
        else:
            modules = {base.__module__ for base in getattr(kind, "__mro__", [kind])}
            ours = [module for module in modules if module.split(".")[0] == torchtune.__name__]
            self._sources |= {str(sys.modules[module].__file__) for module in ours}
            if kind is not value:
                parts = getattr(value, "fingerprint_parts", None)
                found = vars(value) if parts is None else parts()
                self.is_exact = self.is_exact and found is not None
                self.add(found)

    def add_files(self, patterns: Iterable[str]) -> None:
        """Add what files hold; a pattern is a name, with or without ``*``, of files or of a folder.

        Much data is known by place, size, time and edges, because reading it takes as long as tokenizing some of it.
        """
        found: list[tuple[str, Path]] = []
        for pattern in patterns:
            for name in sorted(glob.glob(pattern, recursive=True)) or [pattern]:
                path = Path(name)
                if path.is_dir():
                    inside = [file for file in sorted(path.rglob("*")) if file.is_file()]
                    found += [(str(file.relative_to(path)), file) for file in inside]
                else:
                    found.append((path.suffix, path))
        is_small = sum(path.stat().st_size for _, path in found) <= _WHOLE
        for name, path in found:
            self._feed(name, _content(path, is_small))

    def add_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows that are in memory. Rows that are more than plain data are taken for this process' own."""
        for row in rows:
            try:
                self._feed(json.dumps(row))
            except (TypeError, ValueError):
                self.is_exact = self.is_shared = False
                return


def _content(path: Path, whole: bool) -> str:
    found = path.stat()
    return _content_of(str(path.resolve()), found.st_size, found.st_mtime_ns, found.st_ino, whole)


@functools.lru_cache(maxsize=4096)
def _content_of(path: str, size: int, changed: int, number: int, whole: bool) -> str:
    digest = hashlib.blake2b(digest_size=32)
    with open(path, "rb") as file:
        if whole:
            while chunk := file.read(_EDGE):
                digest.update(chunk)
        else:
            digest.update(f"{path} {size} {changed} {number}".encode())
            digest.update(file.read(_EDGE))
            file.seek(-min(size, _EDGE), os.SEEK_END)
            digest.update(file.read(_EDGE))
    return digest.hexdigest()


@functools.cache
def _library() -> str:
    """The code that makes rows: this library's rooms for data, and the packages that they use."""
    digest = hashlib.sha256()
    root = Path(str(torchtune.__file__)).parent
    for room in _ROOMS:
        for path in sorted((root / room).rglob("*.py")):
            digest.update(path.read_bytes())
    digest.update((root / "utils" / "_json_lines.py").read_bytes())
    for package in _PACKAGES:
        try:
            digest.update(f"{package} {importlib.metadata.version(package)}".encode())
        except importlib.metadata.PackageNotFoundError:
            continue
    return digest.hexdigest()


# Objects of other packages that tokenizers are made of -> what decides about them.
_READERS = {
    "tokenizers.Tokenizer": lambda value: value.to_str(),
    "sentencepiece.SentencePieceProcessor": lambda value: value.serialized_model_proto(),
    "tiktoken.core.Encoding": lambda value: [
        value.name,
        value._pat_str,
        repr(value._mergeable_ranks),
        value._special_tokens,
    ],
}
