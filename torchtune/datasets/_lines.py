"""Rows of local files that have a JSON value per line."""

import glob
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import numpy as np

from torchtune.data import DataError
from torchtune.utils import UserError
from torchtune.utils._json_lines import has_json_lines, is_gzip, json_line, text_line

_BLOCK = 1 << 22  # bytes
_SPACES = np.frombuffer(b" \t\r\n\v\f", np.uint8)


class Line(bytes):
    """A line as it stands in a file; :func:`parsed` reads it."""


class LineRows:
    """A sequence of rows, parsed when they are read: 8 bytes of each are in memory.

    Args:
        paths: of the files.

    Raises:
        DataError: a file cannot be read; when read: it has shrunk since, or a line is broken.
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
            yield self._row(number, line)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        index = range(len(self))[index]
        return self._row(index, next(iter(self.select(range(index, index + 1)).lines())))

    def select(self, indices: Sequence[int] | np.ndarray) -> "LineRows":
        """Some of the rows."""
        part = object.__new__(LineRows)
        part.__dict__ |= vars(self)
        chosen = self._chosen
        part._chosen = (
            chosen[indices.start : indices.stop] if isinstance(indices, range) else np.asarray(chosen)[indices]
        )
        return part

    def filter(self, keep: Callable[[Mapping[str, Any]], bool]) -> "LineRows":
        """The rows for which ``keep`` is true, and broken lines: they are told of, or left out, where they are read."""
        return self.select(np.array([i for i, line in enumerate(self.lines()) if _keeps(keep, line)], np.int64))

    def lines(self) -> Iterator[Line]:
        """The rows as they stand in the files."""
        for file, numbers in groupby(self._chosen, lambda number: bisect_right(self._firsts, number) - 1):
            starts, first = self._starts[file], self._firsts[file]
            path, size = self._paths[file], int(starts[-1])
            try:
                descriptor = os.open(path, os.O_RDONLY)
            except OSError as error:
                raise DataError(f"{path} cannot be read on ({error.strerror}): put it back.") from error
            try:
                for number in numbers:
                    start, end = starts[number - first], starts[number - first + 1]
                    line = os.pread(descriptor, end - start, start)
                    if len(line) < end - start:
                        refuse_shrunk(path, size, os.fstat(descriptor).st_size)
                    yield Line(line)
            finally:
                os.close(descriptor)

    def place(self, index: int) -> str:
        """File and line of a row, for messages; reads what is before it."""
        number = int(self._chosen[index])
        file = bisect_right(self._firsts, number) - 1
        start, before = int(self._starts[file][number - self._firsts[file]]), 0
        with open(self._paths[file], "rb") as opened:
            while start > 0 and (block := opened.read(min(start, _BLOCK))):
                before, start = before + block.count(b"\n"), start - len(block)
        return f"{self._paths[file]}, line {before + 1}"

    def _row(self, index: int, line: Line) -> Mapping[str, Any]:
        try:
            return parsed(line)
        except DataError as error:
            raise DataError(f"{self.place(index)}: {error}; correct the line.") from error


def _keeps(keep: Callable[[Mapping[str, Any]], bool], line: Line) -> bool:
    try:
        row = parsed(line)
    except DataError:
        return True
    return bool(keep(row))


def refuse_shrunk(path: str, before: int, now: int) -> None:
    """Raise :class:`DataError` for a file of which a part is gone."""
    raise DataError(
        f"{path} has shrunk while the run reads it, from {before:,} to {now:,} bytes: put the whole file back and "
        "resume, or start a new run."
    )


def parsed(row: Any, *, is_text: bool = False) -> Any:
    """The columns of a row that is still a :class:`Line`; any other row as it is.

    Raises:
        DataError: with the reason alone, the line is broken.
    """
    if not isinstance(row, Line):
        return row
    try:
        found = {"text": text_line(row)} if is_text else json_line(row)
    except UserError as error:
        raise DataError(str(error)) from error
    if not isinstance(found, dict):
        raise DataError(f"a row must be a mapping column -> value, not {type(found).__name__}")
    return found


def unparsed(rows: Any) -> Iterable[Any]:
    """Rows of any kind one after another; lines as such, so that a broken one is told from those after it."""
    return rows.lines() if isinstance(rows, LineRows) else rows


def matching(names: Sequence[str]) -> list[str]:
    """The files that names and patterns stand for."""
    return [path for name in names for path in sorted(glob.glob(name, recursive=True)) or [name]]


def line_files(names: Sequence[str], *suffixes: str) -> list[str] | None:
    """:func:`matching` files, if all have a row per line: JSON, or what has one of the suffixes; and are not packed."""
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


def _starts(path: str) -> np.ndarray:
    """int64 [rows + 1]: where the lines of a file begin that are not empty, and where the file ends."""
    starts, spaces, base, is_new = [np.empty(0, np.int64)], [np.empty(0, bool)], 0, True
    try:
        with open(path, "rb") as file:
            while block := file.read(_BLOCK):
                content = np.frombuffer(block, np.uint8)
                ends = np.flatnonzero(content == ord("\n")) + 1
                is_last = len(ends) > 0 and ends[-1] == len(block)
                found = np.concatenate([np.zeros(int(is_new), np.int64), ends[: len(ends) - is_last]])
                starts.append(found + base)
                spaces.append(np.isin(content[found], _SPACES))
                base, is_new = base + len(block), is_last
            every = np.concatenate([*starts, [base]])
            blank = []
            for number in np.flatnonzero(np.concatenate(spaces)):
                file.seek(every[number])
                if file.read(every[number + 1] - every[number]).isspace():
                    blank.append(number)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): correct the path or its rights.") from error
    return np.delete(every, blank)
