"""Fingerprints of prepared rows, from everything that they depend on."""

import functools
import glob
import hashlib
import importlib.metadata
import json
import os
import pickle
import re
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torchtune

# Packages, and folders of this library, that affect tokens.
_PACKAGES = ("datasets", "jinja2", "sentencepiece", "tiktoken", "tokenizers")
_ROOMS = ("data", "datasets", "models", "modules/transforms", "tokenizers")
_WHOLE = 1 << 28  # 256 MiB: up to this total size, files are hashed completely
_EDGE = 1 << 20
_PICKLED = ("sentencepiece", "tiktoken", "tokenizers")  # packages that pickle exactly their state


class Fingerprint:
    """Fingerprint of rows, computed from the data and settings that determine them.

    The ``datasets`` package hashes pickles instead. Pickles contain functions by name, without their code, and caches
    of tokenizers, and do not show which setting has changed.

    Args:
        values: name -> value, see :meth:`add`.

    Attributes:
        parts: name -> value, or digest of a long value.
        is_exact: whether the fingerprint covers all values completely, so that other runs can reuse the rows.
        is_shared: whether all processes of this run see the same data, as far as is known.
    """

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        self._known: dict[int, tuple[Any, str]] = {}  # keeps the objects alive, so that their ids stay unique
        self.parts: dict[str, str] = {}
        self.is_exact = True
        self.is_shared = True
        if values is not None:
            for name, value in values.items():
                self.add(name, value)

    @classmethod
    def from_made_of(cls, made_of: Mapping[str, str]) -> "Fingerprint":
        """Return the fingerprint of rows with some :attr:`made_of`, if the code is the same."""
        fingerprint = cls()
        fingerprint.parts = {name: part for name, part in made_of.items() if name != "code"}
        return fingerprint

    @property
    def text(self) -> str:
        """SHA-256 of the parts and the code, 64 hexadecimal digits."""
        return _digest(json.dumps([self.parts, code_digest()]))

    @property
    def made_of(self) -> dict[str, str]:
        """The parts, and the digest of the code as ``code``."""
        return {**self.parts, "code": code_digest()}

    def text_of(self, name: str) -> str:
        """Return the SHA-256 of the parts of the value that was added under a name."""
        parts = {}
        for key, part in self.parts.items():
            if key == name or key.startswith(f"{name}."):  # an attribute of the value
                parts[key] = part
        return _digest(json.dumps(parts))

    def add(self, name: str, value: Any) -> None:
        """Add a value under a name: plain data, or an object of this library, attribute by attribute.

        An object of another package needs an attribute ``fingerprint``, a text that changes when the object does;
        otherwise the fingerprint is not exact.
        """
        has_fingerprint = hasattr(value, "fingerprint_parts") or isinstance(getattr(value, "fingerprint", None), str)
        if not _is_own(type(value)) or has_fingerprint or isinstance(value, Enum):
            self._add_part(name, value)
            return
        # Each attribute is a part, so that a difference can be named.
        self._add_part(name, type(value))
        for attribute, attribute_value in vars(value).items():
            self._add_part(f"{name}.{attribute}", attribute_value)

    def _add_part(self, name: str, value: Any) -> None:
        text = self._text(value)  # also finds out whether the fingerprint stays exact
        # A short value stays readable, so that a message can say what it was.
        is_short = value is None or (isinstance(value, bool | int | float | str) and len(repr(value)) < 64)
        if is_short:
            self.parts[name] = repr(value)
        else:
            self.parts[name] = _digest(text)

    def differences(self, then: Mapping[str, str]) -> list[str]:
        """Return descriptions of the differences from another fingerprint's :attr:`made_of`."""
        return differences_of(self.made_of, then)

    def _text(self, value: Any) -> str:
        """Return a value as JSON, in which a digest stands for each object; empty if it cannot be written."""
        try:
            return json.dumps(value, default=self._digest_of, sort_keys=True)
        except (TypeError, ValueError, RecursionError):  # keys that are not strings, recursive data
            self.is_exact = False
            return ""

    def _digest_of(self, value: Any) -> str:
        """Return the digest of an object that JSON does not know; each object is digested once."""
        if id(value) not in self._known:
            self._known[id(value)] = (value, f"object {len(self._known)}")  # for recursive references
            self._known[id(value)] = (value, _digest(self._text(self._as_plain(value))))
        return self._known[id(value)][1]

    def _as_plain(self, value: Any) -> Any:
        """Return the parts of an object that determine what it does, for :meth:`_text`.

        The order of the cases matters: a mapping or a partial of another package is plain data, and an object that
        states its ``fingerprint`` is believed.
        """
        kind = type(value)
        if isinstance(value, FunctionType | type):
            kind = value
        name = f"{kind.__module__}.{kind.__qualname__}"  # the module of code run by exec may be None
        if isinstance(value, Mapping):
            return dict(value)
        if isinstance(value, set | frozenset):  # whose order differs between processes
            return sorted(value, key=repr)
        if isinstance(value, Enum):
            return [name, value.name]
        if isinstance(value, bytes | Path):
            return [name, str(value)]
        if isinstance(value, re.Pattern):
            return [name, str(value.pattern), value.flags]
        if isinstance(value, functools.partial):
            return [name, value.func, value.args, value.keywords]
        if isinstance(value, MethodType):
            return [value.__func__.__name__, value.__self__]
        if isinstance(getattr(value, "fingerprint", None), str):
            return [name, value.fingerprint]
        if kind is not value and name.partition(".")[0] in _PICKLED:  # objects in C++ or Rust, without attributes
            return [name, pickle.dumps(value)]
        if not _is_own(kind) or "<" in kind.__qualname__:  # the code of a lambda or a local function is not known
            self.is_exact = False
            return name
        if kind is value:  # a function or class of this library, whose code is in `code_digest`
            return name
        if not hasattr(value, "fingerprint_parts"):
            return [name, vars(value)]
        parts = value.fingerprint_parts()
        if parts is None:  # the object depends on something that changes, such as the time of day
            self.is_exact = False
        return [name, parts]

    def add_files(self, name: str, settings: Any, patterns: Iterable[str]) -> None:
        """Add the content of files; a pattern is the name of a file or folder, or a glob pattern.

        Above 256 MiB in total, files are identified by path, size, modification time, inode, and their first and last
        MiB, because reading them completely is slow.
        """
        files: list[tuple[str, Path]] = []  # (what counts of the name, path)
        for pattern in patterns:
            matches = sorted(glob.glob(pattern, recursive=True)) or [pattern]
            for path in map(Path, matches):
                if not path.is_dir():
                    files.append((path.suffix, path))  # a renamed file has the same rows
                    continue
                for file in sorted(path.rglob("*")):
                    if file.is_file():  # the name in a folder may be that of a split
                        files.append((str(file.relative_to(path)), file))
        total_size = sum(path.stat().st_size for _, path in files)
        contents = [(file_name, _content(path, total_size <= _WHOLE)) for file_name, path in files]
        self.parts[name] = _digest(self._text([settings, contents]))

    def add_rows(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows in memory. Rows that are not plain data are treated as specific to this process."""
        digest = hashlib.sha256()
        for row in rows:
            try:
                digest.update(json.dumps(row).encode())
            except (TypeError, ValueError, RecursionError):
                self.is_exact = False
                self.is_shared = False
                return
        self.parts[name] = digest.hexdigest()


def differences_of(now: Mapping[str, str], then: Mapping[str, str]) -> list[str]:
    """Return descriptions of the differences between two fingerprints' ``made_of``."""
    differences = []
    for name in dict.fromkeys([*now, *then]):
        before = then.get(name)
        after = now.get(name)
        if before == after:
            continue
        is_readable = all(text is None or len(text) < 64 for text in (before, after))  # digests have 64 digits
        if is_readable:
            differences.append(f"{name} (was {before}, now {after})")
        else:
            differences.append(name)
    return differences


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _is_own(kind: Any) -> bool:
    """Return whether a class or function is defined in this library."""
    return str(kind.__module__).split(".")[0] == torchtune.__name__


def _content(path: Path, is_whole: bool) -> str:
    """Return a digest of a file: of all its bytes or, unless ``is_whole``, of its status and its edges."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        if is_whole:
            while chunk := file.read(_EDGE):
                digest.update(chunk)
        else:
            status = path.stat()
            digest.update(f"{path.resolve()} {status.st_size} {status.st_mtime_ns} {status.st_ino}".encode())
            digest.update(file.read(_EDGE))
            file.seek(-min(status.st_size, _EDGE), os.SEEK_END)
            digest.update(file.read(_EDGE))
    return digest.hexdigest()


@functools.cache
def code_digest() -> str:
    """Return a digest of the code that prepares rows: this library's data folders, and versions of other packages."""
    digest = hashlib.sha256()
    root = Path(str(torchtune.__file__)).parent
    for room in _ROOMS:
        for path in sorted((root / room).rglob("*.py")):
            digest.update(path.read_bytes())
    digest.update((root / "utils" / "_json.py").read_bytes())  # check_surrogates refuses rows
    for package in _PACKAGES:
        try:
            digest.update(f"{package} {importlib.metadata.version(package)}".encode())
        except importlib.metadata.PackageNotFoundError:
            continue
    return digest.hexdigest()
