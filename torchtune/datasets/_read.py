"""Readers of sources larger than memory, which start at any position."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from torchtune.data import DataError
from torchtune.datasets._lines import Line, line_files, matching, parsed, refuse_shrunk
from torchtune.datasets._preview import NotRead, is_preview
from torchtune.datasets._row_source import LOADERS, load_rows, plain_files, resolve_source, without_added_nulls
from torchtune.utils import first_line, is_gzip

_EDGE = 1 << 20
# Position of a reader, as plain data.
Position = Any


class Row(NamedTuple):
    """Row with its origin: ``source``, and ``line`` or ``row`` counted from 1."""

    content: Line | Mapping[str, Any]
    origin: dict[str, Any]

    def columns(self) -> Mapping[str, Any]:
        """Return column -> value; raise :class:`DataError`, without the line's place, if the line is broken."""
        return parsed(self.content, is_text=self.origin["source"].lower().endswith(".txt"))

    @property
    def place(self) -> str:
        """Origin as text, for messages."""
        source, (kind, number) = self.origin["source"], list(self.origin.items())[1]
        return f"{source}, {kind} {number:,}"


class FileReader:
    """Reader of local files with a row per line. A position is (index in the file order, byte offset, lines before it).

    The ``datasets`` package can stream such files, too, but resumes inside a file by reading it from its beginning, and
    does not name broken lines.

    Args:
        paths: paths of the files.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = list(paths)
        self.files = len(paths)
        self._sizes = [os.path.getsize(path) for path in paths]
        self.size = sum(self._sizes)

    def fingerprint(self) -> str:
        """Return a digest that changes with the number, sizes, beginnings or ends of the files."""
        digest = hashlib.sha256()
        for path, size in zip(self.paths, self._sizes, strict=True):
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
        number, place, before = position or (0, 0, 0)
        rows: list[Row] = []
        while number < self.files and len(rows) < count:
            file = number if order is None else order[number]
            path, size = self.paths[file], self._sizes[file]
            try:
                if (now := os.path.getsize(path)) < size:
                    refuse_shrunk(path, size, now)
                found, place, before = self._rows(path, size, place, before, count - len(rows))
            except OSError as error:
                said = f"{path} cannot be read on ({error.strerror or error})"
                raise DataError(f"{said}: put it back and resume.") from error
            rows += found
            if place is None:
                number, place, before = number + 1, 0, 0
        return rows, [number, place, before] if number < self.files else None

    def _rows(self, path: str, size: int, place: int, before: int, count: int) -> tuple[list[Row], int | None, int]:
        """Return up to ``count`` rows of a file, the next offset (None at the end), and the lines before it."""
        rows: list[Row] = []
        with open(path, "rb") as opened:
            opened.seek(place)
            while place < size and len(rows) < count:
                line = opened.readline()
                place, before = place + len(line), before + 1
                if line.strip() or path.lower().endswith(".txt"):
                    rows.append(Row(Line(line), {"source": path, "line": before}))
        return rows, place if place < size else None, before


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


class TableReader(FileReader):
    """Reader of local files of other kinds with the ``datasets`` package; the offset is the package's state."""

    _opened: tuple[str, HubReader | None] = ("", None)

    def fingerprint(self) -> str:
        """See :meth:`FileReader.fingerprint`."""
        return f"{super().fingerprint()} read by datasets"

    def _rows(self, path: str, size: int, place: Any, before: int, count: int) -> tuple[list[Row], Any, int]:
        if self._opened[0] != path:
            self._opened = (path, HubReader(load_rows(path, split="train", streaming=True), path))
        rows, after = self._opened[1].window([place, before] if place else None, count, None)
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
    if where in LOADERS.values() and (files := plain_files(found | {"streaming": True})) is not None:
        if (paths := line_files(files, ".txt")) is not None:
            return FileReader(paths), shown
        paths = matching(files)
        for path in paths:
            if not path.endswith(".gz") and is_gzip(Path(path)):
                raise DataError(f"{path} is packed by gzip, which a stream reads in *.gz alone: rename or unpack it.")
        return TableReader(paths), shown
    return HubReader(load(), shown), shown
