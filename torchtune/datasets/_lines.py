"""Rows of local JSON Lines files."""

import glob
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import numpy as np

from torchtune.data import DataError
from torchtune.utils import UserError, decode_line, has_json_lines, is_gzip, parse_json_line


class Line(bytes):
    """Undecoded line of a file; :func:`parsed` decodes it."""


class LineRows:
    """Sequence of rows that are parsed when they are read; takes 8 bytes of memory per row.

    The ``datasets`` package does not name broken lines, and gives every row the columns of all other rows.

    Args:
        paths: paths of the files.

    Raises:
        DataError: a file cannot be read; when rows are read: the file has shrunk, or a line is broken.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = list(paths)
        self._starts = [_starts(path) for path in paths]
        self._firsts = [0, *accumulate(len(starts) - 1 for starts in self._starts)]  # rows before each file
        self._chosen: Sequence[int] | np.ndarray = range(self._firsts[-1])

    def __len__(self) -> int:
        return len(self._chosen)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for number, line in enumerate(self.lines()):
            try:
                yield parsed(line)
            except DataError as error:
                raise DataError(f"{self.place(number)}: {error}; correct the line.") from error

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        index = range(len(self))[index]
        return next(iter(self.select(range(index, index + 1))))

    def select(self, indices: Sequence[int] | np.ndarray) -> "LineRows":
        """Return the rows at ``indices``."""
        part = object.__new__(LineRows)
        part.__dict__ |= vars(self)
        chosen = self._chosen
        part._chosen = (
            chosen[indices.start : indices.stop] if isinstance(indices, range) else np.asarray(chosen)[indices]
        )
        return part

    def filter(self, keep: Callable[[Mapping[str, Any]], bool]) -> "LineRows":
        """Return the rows for which ``keep`` is true, and broken lines, which are reported when they are read."""
        return self.select(np.array([i for i, line in enumerate(self.lines()) if _keeps(keep, line)], np.int64))

    def lines(self) -> Iterator[Line]:
        """Yield the undecoded lines of the rows."""
        for file, numbers in groupby(self._chosen, self._file_of):
            path, starts = self._paths[file], self._starts[file]
            try:
                with open(path, "rb") as opened:
                    for number in numbers:
                        start, end = starts[number - self._firsts[file]], starts[number - self._firsts[file] + 1]
                        opened.seek(start)
                        line = opened.read(end - start)
                        if len(line) < end - start:
                            refuse_shrunk(path, starts[-1], opened.seek(0, 2))
                        yield Line(line)
            except OSError as error:
                raise DataError(f"{path} cannot be read on ({error.strerror}): put it back.") from error

    def place(self, index: int) -> str:
        """Return the file and line number of a row, for messages; reads the file up to this row."""
        chosen = int(self._chosen[index])
        file = self._file_of(chosen)
        left, number = self._starts[file][chosen - self._firsts[file]], 0
        with open(self._paths[file], "rb") as opened:
            while left >= 0 and (line := opened.readline()):
                left, number = left - len(line), number + 1
        return f"{self._paths[file]}, line {number}"

    def _file_of(self, number: int) -> int:
        return bisect_right(self._firsts, number) - 1


def _keeps(keep: Callable[[Mapping[str, Any]], bool], line: Line) -> bool:
    try:
        row = parsed(line)
    except DataError:
        return True
    return bool(keep(row))


def refuse_shrunk(path: str, before: int, now: int) -> None:
    """Raise :class:`DataError` for a file that has shrunk from ``before`` to ``now`` bytes."""
    raise DataError(
        f"{path} has shrunk while the run reads it, from {before:,} to {now:,} bytes: put the whole file back and "
        "resume, or start a new run."
    )


def parsed(row: Any, *, is_text: bool = False) -> Any:
    """Decode a :class:`Line` to its columns (``is_text``: to the column ``text``); return other rows unchanged.

    Raises:
        DataError: the line is broken; the message does not name file and line.
    """
    if not isinstance(row, Line):
        return row
    try:
        found = {"text": decode_line(row)} if is_text else parse_json_line(row)
    except UserError as error:
        raise DataError(str(error)) from error
    if not isinstance(found, dict):
        raise DataError(f"a row must be a mapping column -> value, not {type(found).__name__}")
    return found


def unparsed(rows: Any) -> Iterable[Any]:
    """Return an iterable of rows; lines are undecoded, so that a broken line does not end the iteration."""
    return rows.lines() if isinstance(rows, LineRows) else rows


def matching(names: Sequence[str]) -> list[str]:
    """Return the files that match names and glob patterns; names without a match are returned unchanged."""
    return [path for name in names for path in sorted(glob.glob(name, recursive=True)) or [name]]


def line_files(names: Sequence[str], *suffixes: str) -> list[str] | None:
    """Return the :func:`matching` files; None unless all are uncompressed JSON Lines or have one of the suffixes."""
    paths = matching(names)
    try:
        found = all(
            (path.endswith(suffixes) or has_json_lines(Path(path))) and not is_gzip(Path(path)) for path in paths
        )
    except OSError as error:
        raise DataError(
            f"{error.filename} cannot be read ({error.strerror}): correct the path or its rights."
        ) from error
    except UserError as error:
        raise DataError(str(error)) from error
    return paths if found else None


def _starts(path: str) -> array:
    """Return the byte offsets of the non-empty lines of a file, and the file size."""
    starts, place = array("q"), 0
    try:
        with open(path, "rb") as file:
            for line in file:
                if not line.isspace():
                    starts.append(place)
                place += len(line)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): correct the path or its rights.") from error
    starts.append(place)
    return starts
