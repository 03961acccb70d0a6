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
from torchtune.datasets._lines import packed_by, unpacking
from torchtune.datasets._preview import NotRead, is_preview
from torchtune.datasets._row_source import (
    load_rows,
    local_files,
    plain_files,
    resolve_source,
    without_added_nulls,
)
from torchtune.utils import UserError, first_line

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
    def location(self) -> str:
        """Origin as text, for messages."""
        unit = "line" if "line" in self.origin else "row"
        return f"{self.origin['source']}, {unit} {self.origin[unit]:,}"


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
        number, offset, lines_before = position or (0, 0, 0)
        rows: list[Row] = []
        while number < self.files and len(rows) < count:
            file = number if order is None else order[number]
            path = self.paths[file]
            try:
                size = os.path.getsize(path)
                if size < self._sizes[file]:
                    refuse_shrunk(path, self._sizes[file], size)
                file_rows, offset, lines_before = self._rows(file, offset, lines_before, count - len(rows))
            except OSError as error:
                raise DataError(
                    f"{path} cannot be read on ({error.strerror or error}): put it back and resume."
                ) from error
            except DataError:
                raise
            except UserError as error:
                raise DataError(str(error)) from error
            rows += file_rows
            if offset is None:  # the end of the file
                number += 1
                offset = 0
                lines_before = 0
        return rows, [number, offset, lines_before] if number < self.files else None

    def _rows(self, file: int, offset: int, lines_before: int, count: int) -> tuple[list[Row], int | None, int]:
        """Return up to ``count`` rows of a file, the next offset (None at the end), and the lines before it."""
        path = self.paths[file]
        format = self._formats[file]
        if offset == 0:
            offset, lines_before = format.start
        is_plain = packed_by(Path(path)) is None and not isinstance(format, JsonArray)
        # A plain file that grows is read up to its first size. The end of an unpacked file is not known before.
        end = self._sizes[file] if is_plain else None
        rows: list[Row] = []
        with unpacking(Path(path)):
            opened = self._open_at(path, format, offset)
            is_at_end = end is not None and offset >= end
            records = format.divide(opened)
            while len(rows) < count and not is_at_end:
                record, num_lines = next(records, (b"", 0))
                if not record:
                    is_at_end = True
                    break
                if not format.is_blank(record):
                    rows.append(Row(Line.of(record, format), {"source": path, format.unit: lines_before + 1}))
                offset += len(record)
                lines_before += num_lines
                is_at_end = end is not None and offset >= end
        if is_plain or is_at_end:
            opened.close()
            self._opened = None
        else:
            self._opened = (path, offset, opened)
        return rows, None if is_at_end else offset, lines_before

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

    files = 0
    size = None

    def __init__(self, rows: Any, source: str) -> None:
        self._dataset = rows
        self._source = source
        self._beginning = _plain(rows.state_dict())
        self._open: tuple[Position, Iterator[Any]] | None = None

    def fingerprint(self) -> str:
        """Return the name of the source, because a remote source cannot be hashed without reading it."""
        return self._source

    def window(self, position: Position, count: int, order: Sequence[int] | None) -> tuple[list[Row], Position]:
        """See :meth:`FileReader.window`."""
        state, rows_before = position or (None, 0)
        try:
            if self._open is None or self._open[0] != position or position is None:
                self._dataset.load_state_dict(_plain(state or self._beginning))
                self._open = (position, iter(self._dataset))
            _, iterator = self._open
            contents = [without_added_nulls(content) for content in islice(iterator, count)]
            next_position = None
            if len(contents) == count:
                next_position = [_plain(self._dataset.state_dict()), rows_before + count]
        except Exception as error:  # remote readers raise errors of a dozen packages
            raise DataError(
                f"{self._source} cannot be read on after {rows_before:,} rows ({first_line(error)}): resume the run "
                "when it can."
            ) from error
        # The iterator goes on if the next call has the next position.
        self._open = None if next_position is None else (next_position, iterator)
        rows = []
        for number, content in enumerate(contents, rows_before + 1):
            rows.append(Row(content, {"source": self._source, "row": number}))
        return rows, next_position


class ArrowReader(FileReader):
    """Reader of local Parquet and Arrow files with the ``datasets`` package; the offset is the package's state.

    Args:
        paths: paths of the files.
        **kwargs: passed to ``datasets.load_dataset``.
    """

    # Reader of the file that was read last.
    _reader: HubReader | None = None
    _reader_path = ""

    def __init__(self, paths: Sequence[str], **kwargs: Any) -> None:
        super().__init__([(path, JsonLines()) for path in paths])
        self._kwargs = kwargs

    def fingerprint(self) -> str:
        """See :meth:`FileReader.fingerprint`."""
        return f"{super().fingerprint()} read by datasets"

    def _rows(self, file: int, offset: Any, lines_before: int, count: int) -> tuple[list[Row], Any, int]:
        path = self.paths[file]
        if self._reader_path != path:
            self._reader = HubReader(load_rows(path, split="train", streaming=True, **self._kwargs), path)
            self._reader_path = path
        rows, next_position = self._reader.window([offset, lines_before] if offset else None, count, None)
        return rows, None if next_position is None else next_position[0], lines_before + len(rows)


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
    path, kwargs = resolve_source(str(source), load_dataset_kwargs.copy())
    name = str(load_dataset_kwargs.get("data_files") or source)
    if is_preview():
        raise NotRead(f"{name} is streamed: its rows are not counted (streaming=False shows them)")
    files = local_files(path, kwargs)
    if files is not None:
        split = split or "train"
        if split not in files:
            raise DataError(f"{name} has the splits {', '.join(files)}: set split to one of them, not '{split}'.")
        return FileReader(files[split]), name
    if path in ("parquet", "arrow"):
        names = plain_files(kwargs)
        if names is not None:
            return ArrowReader(matching(names)), name
    return HubReader(load(), name), name
