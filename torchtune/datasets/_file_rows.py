"""Rows of local files, found by their offsets."""

import copy
import glob
import os
import shutil
import tempfile
import weakref
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import IO, Any

import numpy as np

from torchtune.data import DataError
from torchtune.datasets._file_formats import FileFormat, JsonArray, Line, packed_by, parsed, unpacking
from torchtune.datasets._row_cache import cache_folder
from torchtune.utils import UserError

_CHUNK = 1 << 20


class FileRows:
    """Sequence of the rows of files, which are parsed when they are read; takes 8 bytes of memory per row.

    A compressed file, or one that holds a JSON list, is written to a temporary file without a name, as lines.

    Args:
        files: (path, format) of each file.

    Raises:
        DataError: a file cannot be read; when rows are read: the file has shrunk, or a row is broken.
    """

    def __init__(self, files: Sequence[tuple[str, FileFormat]]) -> None:
        self._files = [_IndexedFile(path, format) for path, format in files]
        # Number of rows before each file, and of all rows.
        self._firsts = [0, *accumulate(len(file.starts) - 1 for file in self._files)]
        # Numbers of the rows that were not filtered out, in all files.
        self._chosen: Sequence[int] | np.ndarray = range(self._firsts[-1])

    def __len__(self) -> int:
        return len(self._chosen)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for number, line in enumerate(self.lines()):
            try:
                yield parsed(line)
            except DataError as error:
                raise DataError(f"{self.location(number)}: {error}; correct the line.") from error

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        index = range(len(self))[index]
        return next(iter(self.select(range(index, index + 1))))

    def select(self, indices: Sequence[int] | np.ndarray) -> "FileRows":
        """Return the rows at ``indices``."""
        selected = copy.copy(self)
        if isinstance(indices, range):  # a slice, which copies nothing
            selected._chosen = self._chosen[indices.start : indices.stop]
        else:
            selected._chosen = np.asarray(self._chosen)[indices]
        return selected

    def filter(self, keep: Callable[[Mapping[str, Any], int], bool]) -> "FileRows":
        """Return the rows for which ``keep(row, number)`` is true, and broken rows, which are reported when read."""
        kept_rows = []
        for number, line in enumerate(self.lines()):
            try:
                row = parsed(line)
            except DataError:
                kept_rows.append(number)
                continue
            if keep(row, number):
                kept_rows.append(number)
        return self.select(np.array(kept_rows, np.int64))

    def lines(self) -> Iterator[Line]:
        """Yield the undecoded records of the rows."""
        for number, rows in groupby(self._chosen, self._file_of):
            file = self._files[number]
            for record in file.records(int(row) - self._firsts[number] for row in rows):
                yield Line.of(record, file.format)

    def location(self, index: int) -> str:
        """Return the file, and the line or row in it, of a row, for messages; reads the file up to this row."""
        chosen = int(self._chosen[index])
        number = self._file_of(chosen)
        return self._files[number].location(chosen - self._firsts[number])

    def _file_of(self, number: int) -> int:
        """Return the index of the file of a row, by the row's number in all files."""
        return bisect_right(self._firsts, number) - 1


class _IndexedFile:
    """File with the offsets of its rows.

    Attributes:
        starts: offset of each row, and of the end of the file.
    """

    def __init__(self, path: str, format: FileFormat) -> None:
        self.path = path
        self.format = format
        self._copy: int | None = None  # descriptor of the temporary file
        try:
            # Bytes of such a file cannot be found by an offset, so that it is written out first.
            if isinstance(format, JsonArray) or packed_by(Path(path)) is not None:
                self._copy = _unpacked(path, format)
                weakref.finalize(self, os.close, self._copy)
            self.starts = self._find_starts()
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}): correct the path or its rights.") from error
        except DataError:
            raise
        except UserError as error:
            raise DataError(str(error)) from error

    def _open(self) -> IO[bytes]:
        if self._copy is None:
            return open(self.path, "rb")
        return os.fdopen(os.dup(self._copy), "rb")

    def _find_starts(self) -> array:
        """Read the file once, and return the offset of each row and of the end."""
        offset = self.format.start[0]
        starts = array("q")  # 8 bytes per row, which a list of integers takes five times
        with self._open() as file:
            file.seek(offset)
            for record, _ in self.format.divide(file):
                if not self.format.is_blank(record):
                    starts.append(offset)
                offset += len(record)
        starts.append(offset)
        return starts

    def records(self, rows: Iterable[int]) -> Iterator[bytes]:
        """Yield the bytes of rows; blank lines behind a row belong to it."""
        try:
            with self._open() as file:
                for row in rows:
                    start = self.starts[row]
                    length = self.starts[row + 1] - start
                    # Forked processes share the position of the file: read without moving it.
                    record = _read_at(file.fileno(), start, length)
                    if len(record) < length:
                        refuse_shrunk(self.path, self.starts[-1], os.fstat(file.fileno()).st_size)
                    yield record
        except OSError as error:
            raise DataError(f"{self.path} cannot be read on ({error.strerror}): put it back.") from error

    def location(self, row: int) -> str:
        """Return the path, and the line or row, of a row."""
        # Lines are counted when they are asked for: their numbers would double the memory of the index.
        number = 1
        offset = 0
        start = self.starts[row]
        with self._open() as file:
            while offset < start:
                chunk = _read_at(file.fileno(), offset, min(start - offset, _CHUNK))
                if not chunk:
                    break
                number += chunk.count(b"\n")
                offset += len(chunk)
        return f"{self.path}, {self.format.unit} {number}"


def _read_at(descriptor: int, start: int, count: int) -> bytes:
    """Return up to ``count`` bytes from an offset; fewer only at the end of the file."""
    record = os.pread(descriptor, count, start)
    while len(record) < count:
        chunk = os.pread(descriptor, count - len(record), start + len(record))
        if not chunk:
            break
        record += chunk
    return record


def _unpacked(path: str, format: FileFormat) -> int:
    """Write the decompressed records of a file to a temporary file without a name, and return its descriptor."""
    with tempfile.TemporaryFile(dir=cache_folder()) as copy:
        with format.open(path) as file, unpacking(Path(path)):
            shutil.copyfileobj(file, copy, _CHUNK)
        copy.flush()
        return os.dup(copy.fileno())  # the file lives until its last descriptor is closed


def refuse_shrunk(path: str, before: int, now: int) -> None:
    """Raise :class:`DataError` for a file that has shrunk from ``before`` to ``now`` bytes."""
    raise DataError(
        f"{path} has shrunk while the run reads it, from {before:,} to {now:,} bytes: put the whole file back and "
        "resume, or start a new run."
    )


def unparsed(rows: Any) -> Iterable[Any]:
    """Return an iterable of rows; records of files are undecoded, so that a broken one does not end the iteration."""
    if isinstance(rows, FileRows):
        return rows.lines()
    return rows


def location_of(rows: Any, index: int) -> str:
    """Return the file and line of a row, for messages; empty for rows that are not those of files."""
    if isinstance(rows, FileRows):
        return rows.location(index)
    return ""


def matching(names: Sequence[str]) -> list[str]:
    """Return the files that match names and glob patterns; names without a match are returned unchanged."""
    paths = []
    for name in names:
        paths += sorted(glob.glob(name, recursive=True)) or [name]
    return paths
