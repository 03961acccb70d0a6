"""Rows of sources that are larger than memory, read from any position."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torchtune.data import DataError
from torchtune.datasets._lines import Line, line_files, matching, parsed, refuse_shrunk
from torchtune.datasets._load import LOADERS, load_rows, plain_files, resolve_source
from torchtune.datasets._preview import NotRead, is_preview
from torchtune.utils._json_lines import is_gzip

_EDGE = 1 << 20
# Plain data: where a reader goes on.
Position = Any


class Row(NamedTuple):
    """A row as it was read, and where from (``source``, and ``line`` or ``row``, counted from 1)."""

    content: Line | Mapping[str, Any]
    origin: dict[str, Any]

    def columns(self) -> Mapping[str, Any]:
        """Column -> value. Raises :class:`DataError`, with the reason alone, where the line is broken."""
        return parsed(self.content, is_text=self.origin["source"].lower().endswith(".txt"))

    @property
    def place(self) -> str:
        """The origin in words."""
        source, (kind, number) = self.origin["source"], list(self.origin.items())[1]
        return f"{source}, {kind} {number:,}"


class Reader(Protocol):
    """Reads rows in an order of their own."""

    def window(self, position: Position, count: int, order: Sequence[int] | None) -> tuple[list[Row], Position]:
        """Up to ``count`` rows from a position, and the next position; None for either is the beginning or the end.

        Args:
            position: a former next position.
            count: of rows.
            order: of the files; None: as they are.

        Raises:
            DataError: the source cannot be read, or is not what it was.
        """


class _FileReader:
    """Local files; a position is (number of the file in the order, place in the file, rows before it)."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = list(paths)
        self._sizes = [os.path.getsize(path) for path in paths]

    @property
    def files(self) -> int:
        """Number of files."""
        return len(self.paths)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(self._sizes)

    def fingerprint(self) -> str:
        """Changes with the number, sizes, beginnings or ends of the files."""
        digest = hashlib.sha256()
        for path, size in zip(self.paths, self._sizes, strict=True):
            with open(path, "rb") as file:
                digest.update(f"{size} ".encode() + file.read(_EDGE))
                file.seek(-min(size, _EDGE), os.SEEK_END)
                digest.update(file.read(_EDGE))
        return digest.hexdigest()[:16]

    def window(self, position: Position, count: int, order: Sequence[int] | None) -> tuple[list[Row], Position]:
        """See :class:`Reader`."""
        number, place, before = position or (0, 0, 0)
        rows: list[Row] = []
        while number < len(self.paths):
            file = number if order is None else order[number]
            try:
                size = os.path.getsize(self.paths[file])
                if size < self._sizes[file]:
                    refuse_shrunk(self.paths[file], self._sizes[file], size)
                found, place, before = self._rows(file, place, before, count - len(rows))
            except OSError as error:
                raise DataError(
                    f"{self.paths[file]} cannot be read on ({error.strerror or error}): put it back and resume."
                ) from error
            rows += found
            if place is not None:
                return rows, [number, place, before]
            number, place, before = number + 1, 0, 0
            if len(rows) == count and number < len(self.paths):
                return rows, [number, 0, 0]
        return rows, None

    def _rows(self, file: int, place: int, before: int, count: int) -> tuple[list[Row], int | None, int]:
        """Up to ``count`` rows of a file, the next place in it (None at its end), and what is before that."""
        raise NotImplementedError


class LineReader(_FileReader):
    """Files with a row per line; a place is a byte."""

    def _rows(self, file: int, place: int, before: int, count: int) -> tuple[list[Row], int | None, int]:
        path, size, number, rows = self.paths[file], self._sizes[file], before, []
        with open(path, "rb") as opened:
            opened.seek(place)
            while place < size and len(rows) < count:
                line = opened.readline()
                place += len(line)
                number += 1
                if line.strip() or path.lower().endswith(".txt"):
                    rows.append(Row(Line(line), {"source": path, "line": number}))
        return rows, place if place < size else None, number


class ParquetReader(_FileReader):
    """Parquet files; a place is a row."""

    def _rows(self, file: int, place: int, before: int, count: int) -> tuple[list[Row], int | None, int]:
        import pyarrow
        import pyarrow.parquet

        path, rows = self.paths[file], []
        try:
            with pyarrow.parquet.ParquetFile(path) as opened:
                total, start, groups = opened.metadata.num_rows, 0, []
                for group in range(opened.num_row_groups):
                    end = start + opened.metadata.row_group(group).num_rows
                    if end > place and start < place + count:
                        groups.append((group, start))
                    start = end
                skip = place - groups[0][1] if groups else 0
                for batch in opened.iter_batches(1024, row_groups=[group for group, _ in groups]):
                    part = batch.slice(min(skip, len(batch)), count - len(rows))
                    skip = max(0, skip - len(batch))
                    rows += part.to_pylist()
                    if len(rows) == count:
                        break
        except pyarrow.ArrowException as error:
            raise DataError(f"{path} is not a Parquet file, or not the whole of it: put it back and resume.") from error
        place += len(rows)
        found = [Row(row, {"source": path, "row": before + i}) for i, row in enumerate(rows, 1)]
        return found, place if place < total else None, before + len(rows)


class HubReader:
    """What else the ``datasets`` package streams: the hub, and other files; a position is (its state, rows before).

    Args:
        rows: a ``datasets.IterableDataset``.
        source: what the rows are from.
        size: bytes of local files; None: not known.
    """

    files = 0

    def __init__(self, rows: Any, source: str, size: int | None = None) -> None:
        self._dataset, self._source, self.size = rows, source, size
        self._beginning = _plain(rows.state_dict())
        self._open: tuple[Position, Iterator[Any]] | None = None

    def fingerprint(self) -> str:
        """Nothing is known of a remote source without reading it."""
        return self._source

    def window(self, position: Position, count: int, order: Sequence[int] | None) -> tuple[list[Row], Position]:
        """See :class:`Reader`."""
        state, before = position or (None, 0)
        try:
            if self._open is None or self._open[0] != position or position is None:
                self._dataset.load_state_dict(_plain(state or self._beginning))
                self._open = (position, iter(self._dataset))
            rows = list(islice(self._open[1], count))
            after = [_plain(self._dataset.state_dict()), before + len(rows)] if len(rows) == count else None
        except Exception as error:  # remote readers raise errors of a dozen packages
            reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
            raise DataError(
                f"{self._source} cannot be read on after {before:,} rows ({reason}): resume the run when it can."
            ) from error
        self._open = None if after is None else (after, self._open[1])
        return [Row(row, {"source": self._source, "row": before + i}) for i, row in enumerate(rows, 1)], after


def _plain(state: Any) -> Any:
    """A copy that no iterator changes, as it is after a resume."""
    return json.loads(json.dumps(state))


def open_reader(source: Any, **load_dataset_kwargs: Any) -> tuple[Any, str]:
    """The reader of a source, and what to call the source in messages.

    Raises:
        DataError: the source is not there, or cannot be streamed.
        NotRead: within a preview, which does not read streams.
    """
    if not isinstance(source, str | Path):
        raise DataError("streaming=True reads files and the hub: leave it out for rows in memory.")
    # Written as a call, so that configs are checked against the arguments of what it calls.
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
            return LineReader(paths), shown
        if where == "parquet":
            return ParquetReader(matching(files)), shown
        for path in matching(files):
            if not path.endswith(".gz") and is_gzip(Path(path)):
                raise DataError(f"{path} is packed by gzip, which a stream reads in *.gz alone: rename or unpack it.")
        return HubReader(load(), shown, sum(map(os.path.getsize, matching(files)))), shown
    return HubReader(load(), shown), shown
