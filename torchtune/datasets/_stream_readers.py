"""Readers of sources larger than memory, which start at any position."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

from torchtune.data import DataError
from torchtune.datasets._file_formats import FileFormat, JsonArray, JsonLines, Line, parsed
from torchtune.datasets._file_rows import matching, refuse_shrunk
from torchtune.datasets._preview import NotRead, is_preview
from torchtune.datasets._row_source import (
    load_rows,
    local_files,
    plain_files,
    resolve_source,
    without_added_nulls,
)
from torchtune.utils import UserError, first_line, packed_by, unpacking

_EDGE = 1 << 20
# Position of a reader, as plain data.
Position = Any


class Row(NamedTuple):
    """Row with its origin: ``source``, and ``line`` or ``row`` counted from 1."""

    content: Line | Mapping[str, Any]
    origin: dict[str, Any]

    def columns(self) -> Mapping[str, Any]:
        """Return column -> value; raise :class:`DataError`, without the line's place, if the line is broken."""
        return parsed(self.content)

    @property
    def place(self) -> str:
        """Origin as text, for messages."""
        source, (kind, number) = self.origin["source"], list(self.origin.items())[1]
        return f"{source}, {kind} {number:,}"


class FileReader:
    """Reader of local files. A position is (index in the file order, byte offset of the next record, lines before it).

    The ``datasets`` package can stream such files, too, but resumes inside a file by reading it from its beginning,
    infers types, and does not name broken lines.

    Args:
        files: (path, format) of each file.
    """

    def __init__(self, files: Sequence[tuple[str, FileFormat]]) -> None:
        self.paths = [path for path, _ in files]
        self.files = len(files)
        self._formats = [format for _, format in files]
        self._sizes = [os.path.getsize(path) for path in self.paths]
        # A file that has to be unpacked or parsed as a whole is only read forwards: (path, offset, opened file).
        self._opened: tuple[str, int, IO[bytes]] | None = None
        self.size = sum(self._sizes)

    def fingerprint(self) -> str:
        """Return a digest that changes with the number, sizes, beginnings or ends of the files, and their formats."""
        digest = hashlib.sha256()
        for path, size, format in zip(self.paths, self._sizes, self._formats, strict=True):
            if type(format) is not JsonLines:
                digest.update(repr(format).encode())
            with open(path, "rb") as file:
                digest.update(f"{size} ".encode() + file.read(_EDGE))
                file.seek(-min(size, _EDGE), os.SEEK_END)
                digest.update(file.read(_EDGE))
        return digest.hexdigest()[:16]

    def window(self, position: Position, count: int, order: Sequence[int] | None) -> tuple[list[Row], Position]:
        """Return up to ``count`` rows from a position, and the next position (None at the end).

        Args:
            position: next position from an earlier call; None starts at the beginning.
            count: maximum number of rows.
            order: order of the files; None keeps it.

        Raises:
            DataError: the source cannot be read, or a file has shrunk.
        """
        number, offset, before = position or (0, 0, 0)
        rows: list[Row] = []
        while number < self.files and len(rows) < count:
            file = number if order is None else order[number]
            path, size = self.paths[file], self._sizes[file]
            try:
                if (now := os.path.getsize(path)) < size:
                    refuse_shrunk(path, size, now)
                part, offset, before = self._rows(file, offset, before, count - len(rows))
            except OSError as error:
                said = f"{path} cannot be read on ({error.strerror or error})"
                raise DataError(f"{said}: put it back and resume.") from error
            except UserError as error:
                raise error if isinstance(error, DataError) else DataError(str(error)) from error
            rows += part
            if offset is None:
                number, offset, before = number + 1, 0, 0
        return rows, [number, offset, before] if number < self.files else None

    def _rows(self, file: int, offset: int, before: int, count: int) -> tuple[list[Row], int | None, int]:
        """Return up to ``count`` rows of a file, the next offset (None at the end), and the lines before it."""
        path, format, rows = self.paths[file], self._formats[file], []
        if offset == 0:
            offset, before = format.start
        is_plain = packed_by(Path(path)) is None and not isinstance(format, JsonArray)
        end = self._sizes[file] if is_plain else None  # a file that grows is read up to its first size
        with unpacking(Path(path)):
            opened = self._open_at(path, format, offset)
            for record, lines in format.divide(opened) if end is None or offset < end else ():
                if not format.is_blank(record):
                    rows.append(Row(Line.of(record, format), {"source": path, format.unit: before + 1}))
                offset, before = offset + len(record), before + lines
                if len(rows) == count or (end is not None and offset >= end):
                    break
            else:
                end = offset
        if is_plain or offset == end:
            opened.close()
            self._opened = None
        else:
            self._opened = (path, offset, opened)
        return rows, None if end is not None and offset >= end else offset, before

    def _open_at(self, path: str, format: FileFormat, offset: int) -> IO[bytes]:
        if self._opened is not None and self._opened[:2] == (path, offset):
            return self._opened[2]
        return format.open(path, offset)


class HubReader:
    """Reader of Hub datasets with the ``datasets`` package. A position is (state, number of rows before it).

    Args:
        rows: a ``datasets.IterableDataset``.
        source: name of the source.
    """

    files, size = 0, None

    def __init__(self, rows: Any, source: str) -> None:
        self._dataset, self._source = rows, source
        self._beginning = _plain(rows.state_dict())
        self._open: tuple[Position, Iterator[Any]] | None = None

    def fingerprint(self) -> str:
        """Return the name of the source, because a remote source cannot be hashed without reading it."""
        return self._source

    def window(self, position: Position, count: int, order: Sequence[int] | None) -> tuple[list[Row], Position]:
        """See :meth:`FileReader.window`."""
        state, before = position or (None, 0)
        try:
            if self._open is None or self._open[0] != position or position is None:
                self._dataset.load_state_dict(_plain(state or self._beginning))
                self._open = (position, iter(self._dataset))
            rows = [without_added_nulls(row) for row in islice(self._open[1], count)]
            after = [_plain(self._dataset.state_dict()), before + len(rows)] if len(rows) == count else None
        except Exception as error:  # remote readers raise errors of a dozen packages
            raise DataError(
                f"{self._source} cannot be read on after {before:,} rows ({first_line(error)}): resume the run when it "
                "can."
            ) from error
        self._open = None if after is None else (after, self._open[1])
        return [Row(row, {"source": self._source, "row": before + i}) for i, row in enumerate(rows, 1)], after


class ArrowReader(FileReader):
    """Reader of local Parquet and Arrow files with the ``datasets`` package; the offset is the package's state.

    Args:
        paths: paths of the files.
        **kwargs: passed to ``datasets.load_dataset``.
    """

    _read: tuple[str, HubReader | None] = ("", None)

    def __init__(self, paths: Sequence[str], **kwargs: Any) -> None:
        super().__init__([(path, JsonLines()) for path in paths])
        self._kwargs = kwargs

    def fingerprint(self) -> str:
        """See :meth:`FileReader.fingerprint`."""
        return f"{super().fingerprint()} read by datasets"

    def _rows(self, file: int, offset: Any, before: int, count: int) -> tuple[list[Row], Any, int]:
        path = self.paths[file]
        if self._read[0] != path:
            self._read = (path, HubReader(load_rows(path, split="train", streaming=True, **self._kwargs), path))
        rows, after = self._read[1].window([offset, before] if offset else None, count, None)
        return rows, None if after is None else after[0], before + len(rows)


def _plain(state: Any) -> Any:
    """Copy a state through JSON, as a checkpoint does, so that iterators do not change it."""
    return json.loads(json.dumps(state))


def open_reader(source: Any, **load_dataset_kwargs: Any) -> tuple[FileReader | HubReader, str]:
    """Return the reader of a source, and the name of the source for messages.

    Raises:
        DataError: the source does not exist or cannot be streamed.
        NotRead: inside a preview, which does not read streams.
    """
    if not isinstance(source, str | Path):
        raise DataError("streaming=True reads files and the hub: leave it out for rows in memory.")
    # A call, so that configs are checked against the arguments of `load_rows`.
    load = partial(load_rows, str(source), streaming=True, **load_dataset_kwargs)
    split = load_dataset_kwargs.get("split")
    if split is not None and ("[" in split or "+" in split):
        raise DataError(f"split='{split}' is a part, which a stream cannot find: name a whole split.")
    where, found = resolve_source(str(source), load_dataset_kwargs.copy())
    shown = str(load_dataset_kwargs.get("data_files") or source)
    if is_preview():
        raise NotRead(f"{shown} is streamed: its rows are not counted (streaming=False shows them)")
    files = local_files(where, found)
    if files is not None:
        split = split or "train"
        if split not in files:
            raise DataError(f"{shown} has the splits {', '.join(files)}: set split to one of them, not '{split}'.")
        return FileReader(files[split]), shown
    if where in ("parquet", "arrow") and (names := plain_files(found)) is not None:
        return ArrowReader(matching(names)), shown
    return HubReader(load(), shown), shown
