"""Datasets that are read and tokenized during training, and readers of their sources, which start at any position."""

import hashlib
import json
import logging
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa

from torchtune.data import DataError, ExampleDataset, make_random_state, seeded_generators
from torchtune.datasets._bad_rows import list_left_out, num_left_out
from torchtune.datasets._command_modes import NotRead, is_preview
from torchtune.datasets._data_files import local_files, matching, plain_files, refuse_shrunk, resolve_source
from torchtune.datasets._file_formats import FileFormat, JsonArray, JsonLines, Line, decode_row, packed_by, unpacking
from torchtune.datasets._packed import Piece, best_fit, document_of, split_evenly, whole_rows
from torchtune.datasets._processes import ROWS, Worker, processes
from torchtune.datasets._row_source import load_rows, without_added_nulls
from torchtune.datasets._token_store import TokenStore
from torchtune.datasets._tokenized import RowTokenizer
from torchtune.utils import UserError, first_line, get_logger, log_once, log_rank_zero

_EDGE = 1 << 20
# Position of a reader, as plain data.
Position = Any


class Row(NamedTuple):
    """Row with its origin: ``source``, and ``line`` or ``row`` counted from 1."""

    content: Line | Mapping[str, Any]
    origin: dict[str, Any]

    def columns(self) -> Mapping[str, Any]:
        """Return column -> value; raise :class:`DataError`, without the line's place, if the line is broken."""
        return decode_row(self.content)

    @property
    def location(self) -> str:
        """Origin as text, for messages."""
        unit = "row"
        if "line" in self.origin:
            unit = "line"
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
        self.num_files = len(files)
        self._formats = [format for _, format in files]
        self._sizes = [os.path.getsize(path) for path in self.paths]
        # A file that has to be unpacked or parsed as a whole is only read forwards: (path, offset, opened file).
        self._opened: tuple[str, int, IO[bytes]] | None = None
        self.size = sum(self._sizes)

    def fingerprint(self) -> str:
        """Return a digest that changes with the number, sizes, beginnings or ends of the files, and their formats."""
        digest = hashlib.sha256()
        for path, size, format in zip(self.paths, self._sizes, self._formats, strict=True):
            if type(format) is not JsonLines:  # fingerprints of earlier releases knew no other formats
                digest.update(repr(format).encode())
            with open(path, "rb") as file:
                digest.update(f"{size} ".encode())
                digest.update(file.read(_EDGE))
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
        order_index, offset, lines_before = position or (0, 0, 0)
        rows: list[Row] = []
        while order_index < self.num_files and len(rows) < count:
            file_index = order_index
            if order is not None:
                file_index = order[order_index]
            path = self.paths[file_index]
            try:
                size = os.path.getsize(path)
                if size < self._sizes[file_index]:  # a saved offset would no longer be the start of a record
                    refuse_shrunk(path, self._sizes[file_index], size)
                file_rows, offset, lines_before = self._rows(file_index, offset, lines_before, count - len(rows))
            except OSError as error:
                raise DataError(
                    f"{path} can no longer be read ({error.strerror or error}): put it back and resume."
                ) from error
            except DataError:  # a UserError as well, which is complete
                raise
            except UserError as error:
                raise DataError(str(error)) from error
            rows += file_rows
            if offset is None:  # the end of the file
                order_index += 1
                offset = 0
                lines_before = 0
        if order_index == self.num_files:
            return rows, None  # the end
        return rows, [order_index, offset, lines_before]

    def _rows(self, file_index: int, offset: int, lines_before: int, count: int) -> tuple[list[Row], int | None, int]:
        """Return up to ``count`` rows of a file, the next offset (None at the end), and the lines before it.

        ``offset`` counts decompressed bytes. Blank lines are not rows, but count as lines.
        """
        path = self.paths[file_index]
        format = self._formats[file_index]
        if offset == 0:
            offset, lines_before = format.start  # behind a header, if the format has one
        is_plain = packed_by(Path(path)) is None and not isinstance(format, JsonArray)
        # Unknown for a compressed file, and for a JSON array, whose rows become lines in memory.
        end: int | None = None
        if is_plain:  # a file that grows is read up to its first size
            end = self._sizes[file_index]
        rows: list[Row] = []
        with unpacking(Path(path)):
            if self._opened is not None and self._opened[:2] == (path, offset):
                _, _, opened = self._opened  # where the last window ended
            else:
                opened = format.open(path, offset)
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
        else:  # kept open, because the next window would have to unpack or parse the file up to here again
            self._opened = (path, offset, opened)
        if is_at_end:
            return rows, None, lines_before
        return rows, offset, lines_before


class HubReader:
    """Reader of Hub datasets with the ``datasets`` package. A position is (state, number of rows before it).

    Args:
        rows: a ``datasets.IterableDataset``.
        source: name of the source.
    """

    num_files = 0
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
        """See :meth:`FileReader.window`; ``order`` is ignored, because the package orders the files."""
        state, rows_before = position or (None, 0)
        try:
            # Loading a state reads its file again from the beginning, so that the open iterator goes on where it can.
            if self._open is None or self._open[0] != position or position is None:
                self._dataset.load_state_dict(_plain(state or self._beginning))
                self._open = (position, iter(self._dataset))
            _, iterator = self._open
            contents = [without_added_nulls(content) for content in islice(iterator, count)]
            next_position = None
            if len(contents) == count:  # fewer rows: the end
                next_position = [_plain(self._dataset.state_dict()), rows_before + count]
        except Exception as error:  # remote readers raise errors of a dozen packages
            self._open = None  # an iterator that has raised is at its end: the next call would find no more rows
            raise DataError(
                f"{self._source} can no longer be read after {rows_before:,} rows ({first_line(error)}): resume "
                "the run when it can."
            ) from error
        self._open = None
        if next_position is not None:  # the iterator goes on if the next call has this position
            self._open = (next_position, iterator)
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

    def _rows(self, file_index: int, offset: Any, lines_before: int, count: int) -> tuple[list[Row], Any, int]:
        path = self.paths[file_index]
        if self._reader_path != path:
            self._reader = HubReader(load_rows(path, split="train", streaming=True, **self._kwargs), path)
            self._reader_path = path
        position = None  # the beginning
        if offset:
            position = [offset, lines_before]
        rows, next_position = self._reader.window(position, count, None)
        next_offset = None
        if next_position is not None:
            next_offset, _ = next_position
        return rows, next_offset, lines_before + len(rows)


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
    if is_preview():  # a preview counts rows, for which a stream would be read to its end
        raise NotRead(f"{name} is streamed: its rows are not counted (streaming=False shows them)")
    files = local_files(path, kwargs)
    if files is not None:
        split = split or "train"
        if split not in files:
            raise DataError(f"{name} has the splits {', '.join(files)}: set split to one of them, not '{split}'.")
        return FileReader(files[split]), name
    if path in ("parquet", "arrow"):
        names = plain_files(kwargs)  # None if a file is remote, or a setting needs the package
        if names is not None:
            return ArrowReader(matching(names)), name
    return HubReader(load(), name), name


_NUM_CACHED = 3  # windows
_SMALL = 1 << 22  # bytes; smaller sources are not worth a process


class _WindowStart(NamedTuple):
    """Start of a window: its first example, its number, completed passes over the data, position in the source."""

    example: int
    window: int
    passes: int
    position: Position


_BEGINNING = _WindowStart(0, 0, 0, None)


class _TokenRows(NamedTuple):
    """Token rows of consecutive source rows.

    Attributes:
        batch: the token rows.
        numbers: number of the source row of each token row.
        bad: (number, reason) of source rows that cannot be trained on.
        omitted: kind of text that the chat template leaves out -> number of the first source row with such a text.
    """

    batch: pa.RecordBatch
    numbers: list[int]
    bad: list[tuple[int, str]]
    omitted: dict[str, int]


class _Window:
    """Consecutive rows that are shuffled and packed together."""

    def __init__(self, start: _WindowStart, rows: list[Row], after: Position) -> None:
        self.start = start
        self.rows = rows
        self.after = after
        self.requests: list[Callable[[], _TokenRows]] = []  # one for every ROWS rows
        self.numbers: list[int] = []  # row of each token row
        self.store: TokenStore | None = None
        self.packs: list[list[Piece]] = []
        self.order = np.empty(0, np.int64)  # position -> row or pack

    def item_at(self, position: int) -> int:
        """Return the row, token row or pack at a position of the shuffled window."""
        return int(self.order[position])


class StreamedDataset(ExampleDataset):
    """Dataset of a source that is larger than memory, read and tokenized during training.

    The source is read in windows of ``shuffle_buffer`` rows; each window is shuffled and packed separately. Indices
    count the examples of the whole run without end: after the last row, the source is read again in another order.
    Every rank reads all rows, but parses and tokenizes only the rows of its own examples, unless packing, a filter or
    skipping require all rows. Therefore the examples do not depend on the number of ranks, and a resume reads the
    source from the saved position on. Random numbers that a transform draws depend only on the seed and the position of
    the row.

    For sources above 4 MB, :meth:`begin` forks a worker process that tokenizes the next window, or the examples of
    :meth:`read_ahead`, in advance. The fork keeps the memory of its parent: create the dataset before the model.

    Args:
        transform: row -> ``tokens`` and ``labels``.
        source: Hub dataset, folder or file.
        limit: maximum row length in tokens that ``transform`` truncates to; ``None`` if it does not truncate.
        side: side that ``transform`` truncates, ``"right"`` or ``"left"``.
        tokenizer: tokenizer that ``transform`` calls; texts that its chat template leaves out are logged once a kind.
        pack_length: maximum number of tokens per pack; ``None`` disables packing.
        split_across_pack: fill packs completely by splitting rows.
        filter_fn: function of a row; rows for which it returns False are dropped.
        shuffle_buffer: number of rows per window.
        on_bad_row: ``stop`` at a row that cannot be trained on, or ``skip`` and list such rows.
        prepared: must be None.
        drop_duplicates: must be False.
        filter_kwargs: must be None.
        streaming: ignored; builders pass it.
        **load_dataset_kwargs: passed to ``datasets.load_dataset``.

    Raises:
        DataError: the source does not exist or cannot be streamed; when read: it is unreadable, has shrunk, or has a
            row that cannot be trained on (named by line).

    Example:
        >>> path = folder / "rows.jsonl"
        >>> _ = path.write_text('{"ids": [1, 2]}\\n{"ids": [3]}\\n')
        >>> stream = torchtune.datasets.StreamedDataset(
        ...     lambda row: {"tokens": row["ids"], "labels": row["ids"]}, str(path), limit=None
        ... )
        >>> stream[0]["tokens"], stream[3]["tokens"]  # the file begins again
        ([1, 2], [3])
    """

    is_stream = True

    @property
    def is_packed(self) -> bool:
        """Whether examples are packs."""
        return self._capacity is not None

    def __init__(
        self,
        transform: Callable[[Mapping[str, Any]], Mapping[str, Any]],
        source: Any,
        *,
        limit: int | None,
        side: str = "right",
        tokenizer: Any = None,
        pack_length: int | None = None,
        split_across_pack: bool = False,
        filter_fn: Callable[[Mapping[str, Any]], bool] | None = None,
        shuffle_buffer: int = 10_000,
        on_bad_row: Literal["stop", "skip"] = "stop",
        prepared: str | None = None,
        drop_duplicates: bool = False,
        filter_kwargs: Mapping[str, Any] | None = None,
        streaming: bool = True,
        **load_dataset_kwargs: Any,
    ) -> None:
        if shuffle_buffer < 1:
            raise DataError(f"shuffle_buffer must be at least 1, not {shuffle_buffer}.")
        if on_bad_row not in ("stop", "skip"):
            raise DataError(f"on_bad_row must be stop or skip, not '{on_bad_row}'.")
        # Settings of datasets that read all rows, which a config may still have.
        if prepared is not None:
            raise DataError("prepared data are read from disk as they are needed: leave streaming out.")
        if drop_duplicates:
            raise DataError("drop_duplicates compares all rows, which a stream does not keep: leave one of both out.")
        if filter_kwargs is not None:
            raise DataError("filter_kwargs is not possible for a stream: let filter_fn take one row.")
        self._reader, self.source = open_reader(source, **load_dataset_kwargs)
        self._row_tokenizer = RowTokenizer(transform, tokenizer=tokenizer, limit=limit, side=side)
        self._longest: int | None = None  # tokens of a row that the model reads; `limit_rows` sets it
        self._reported_kinds: set[str] = set()  # of texts that the chat template leaves out
        self._filter = filter_fn
        self._window_size = shuffle_buffer
        self._capacity = pack_length
        self._splits = split_across_pack
        self._skips = on_bad_row == "skip"
        # Only the rows of this rank's examples are tokenized, if no other row has an influence on them.
        self._is_lazy = pack_length is None and filter_fn is None and not self._skips
        self.fingerprint = f"{self._reader.fingerprint()} in windows of {shuffle_buffer} rows, on_bad_row={on_bad_row}"
        self._ahead: Worker | None = None
        self._begin(_BEGINNING, 0, False)  # readable without `begin`, in the order of the source

    def limit_rows(self, longest: int) -> None:
        """See :meth:`torchtune.data.ExampleDataset.limit_rows`; rows that packs divide are cut instead."""
        self._longest = longest
        if not self._splits:
            self._row_tokenizer.longest = longest

    def begin(self, seed: int, *, shuffle: bool) -> None:
        """Move to the first example; the order depends on ``seed`` if ``shuffle``."""
        self._begin(_BEGINNING, seed, shuffle)
        is_large = self._reader.size is None or self._reader.size > _SMALL
        if self._ahead is None and is_large and processes() > 1:
            advice = "free some and resume, or start a new run with a smaller shuffle_buffer"
            try:
                self._ahead = Worker(self._tokenized, f"tokenizes {self.source}", advice)
            except OSError as error:
                get_logger().warning(
                    f"No process can be started to tokenize {self.source} ahead ({error.strerror}): the training "
                    "process does it, and its steps take longer."
                )

    def _begin(self, start: _WindowStart, seed: int, shuffle: bool) -> None:
        """Move to the start of a window, and forget the windows and requests of another position."""
        self._seed = seed
        self._shuffle = shuffle
        self._starts = [start]  # of all windows read so far, and of the next one
        self._windows: dict[int, _Window] = {}
        self._next: _Window | None = None  # being tokenized by the worker
        self._requested: dict[int, tuple[Row, Callable[[], _TokenRows]]] = {}  # by index
        worker = self._worker()
        if worker is not None:
            worker.cancel()

    def _worker(self) -> Worker | None:
        """Return this process's worker; None in a forked copy."""
        if self._ahead is None or not self._ahead.is_here:
            return None
        return self._ahead

    def state_at(self, index: int) -> dict[str, Any]:
        """Return the start of the window that contains an example already read or next, as plain data."""
        return self._starts[self._index_of_start(index)]._asdict()

    def go_to(self, state: Mapping[str, Any]) -> None:
        """Restore a state that :meth:`state_at` returned."""
        self._begin(_WindowStart(**state), self._seed, self._shuffle)

    def read_ahead(self, indices: Sequence[int]) -> None:
        """Request the next examples, or the window that contains them, from the worker process if there is one."""
        self._request_window()
        if self._worker() is None or not self._is_lazy:
            return
        with suppress(DataError):  # raised again when the example is read
            for index in indices:
                self._requested[index] = self._request_example(index)

    def __getitem__(self, index: int) -> Any:
        """Return an example, ``tokens`` and ``labels``, or a pack, as map-style datasets do."""
        worker = self._worker()
        if worker is not None:
            worker.drain()  # a full pipe would stop it before it has tokenized all that was requested
        if self._is_lazy:
            request = self._requested.pop(index, None)
            if request is None:  # no worker was asked for it in advance
                request = self._request_example(index)
            row, answer = request
            tokens = answer()
            self._leave_out([(row, reason) for _, reason in tokens.bad])  # raises: a lazy stream skips no rows
            self._report_omitted([row], tokens.omitted)
            return TokenStore([tokens.batch]).lists(0)
        window, position = self._find(index)
        item = window.item_at(position)
        if not window.packs:
            return window.store.lists(item)
        return [document_of(window.store[row], start, end) for row, start, end in window.packs[item]]

    def origins(self, index: int) -> list[dict[str, Any]]:
        """Return ``source``, and ``line`` or ``row`` counted from 1, of each document of an example."""
        window, position = self._find(index)
        item = window.item_at(position)
        if self._is_lazy:
            return [window.rows[item].origin]
        token_rows = [item]
        if window.packs:
            token_rows = [row for row, _, _ in window.packs[item]]
        return [window.rows[window.numbers[row]].origin for row in token_rows]

    def _request_example(self, index: int) -> tuple[Row, Callable[[], _TokenRows]]:
        """Return the row of an example, and the function that returns its tokens."""
        window, position = self._find(index)
        row = window.rows[window.item_at(position)]
        return row, self._request_tokens((self._seed, index), [row])

    def _request_tokens(self, words: Sequence[int], rows: Sequence[Row]) -> Callable[[], _TokenRows]:
        """Start :meth:`_tokenized` in the worker, and return the function that returns its result.

        Without a worker, that function does the work itself.
        """
        worker = self._worker()
        if worker is None:
            return partial(self._tokenized, words, rows)
        return partial(worker.answer, worker.ask(words, rows))

    def _tokenized(self, words: Sequence[int], rows: Sequence[Row]) -> _TokenRows:
        """Tokenize rows that are not filtered; ``words`` seed the random numbers of the transform."""
        numbers: list[int] = []  # among ``rows``, of those that are not filtered
        columns: list[Mapping[str, Any]] = []
        bad: list[tuple[int, str]] = []
        # A filter or transform may draw random numbers, which no other row and no earlier resume may change.
        with seeded_generators(*words):
            for number, row in enumerate(rows):
                try:
                    values = row.columns()
                except DataError as error:
                    bad.append((number, str(error)))
                    continue
                if self._filter is None or self._filter(values):
                    numbers.append(number)
                    columns.append(values)
            tokenized = self._row_tokenizer.tokenize_part(0, columns, lambda index: rows[numbers[index]].location)
        if tokenized is None:
            raise DataError(f"{self.source}: rows with more than text cannot be streamed: leave streaming out.")
        batch, facts = tokenized
        # The facts count the rows that were tokenized: number them among all rows.
        bad += [(numbers[index], reason) for index, reason in facts["bad"]]
        omitted = {kind: numbers[indices[0]] for kind, indices in facts["omitted"].items()}
        row_numbers = [numbers[index] for index in facts["numbers"]]
        return _TokenRows(batch, row_numbers, sorted(bad), omitted)

    def _index_of_start(self, index: int) -> int:
        """Return the position in the list of starts of the window that has an example, or that comes next."""
        number = bisect_right(self._starts, index, key=lambda start: start.example) - 1
        if number < 0:
            raise IndexError(f"example {index} comes before the position {self._starts[0].example}")
        return number

    def _find(self, index: int) -> tuple[_Window, int]:
        """Return the completed window of an example and the example's position in it."""
        number = self._index_of_start(index)
        while number == len(self._starts) - 1:  # the last start is that of a window to come
            self._extend()
            number = self._index_of_start(index)
        start = self._starts[number]
        # A window that is no longer kept is read again, for example after a step back.
        window = self._windows.get(start.window)
        if window is None:
            window = self._read(start)
            self._complete(window)
        return window, index - start.example

    def _extend(self) -> None:
        """Complete the next window, and request the tokens of the window after it."""
        start = self._starts[-1]
        window = self._next or self._read(start)
        self._next = None
        self._complete(window)
        next_example = start.example + len(window.order)
        passes = start.passes
        if window.after is None:
            passes += 1
            # A pass without an example would be followed by others without end.
            pass_starts = [earlier for earlier in self._starts if earlier.position is None]
            if pass_starts and pass_starts[-1].example == next_example:
                raise DataError(f"There are no rows in {self.source}.")
            log_rank_zero(get_logger(), f"{self.source} is read to its end: it is read again from its beginning.")
        self._starts.append(_WindowStart(next_example, start.window + 1, passes, window.after))
        self._request_window()

    def _request_window(self) -> None:
        """Read the next window and request its tokens from the worker, if there is one and it was not done yet."""
        if self._worker() is not None and not self._is_lazy and self._next is None:
            with suppress(DataError):  # raised again when the window is needed
                self._next = self._read(self._starts[-1])

    def _read(self, start: _WindowStart) -> _Window:
        """Read the rows of a window, and request their tokens unless they are tokenized one by one."""
        order = None
        if self._shuffle and self._reader.num_files > 1:  # another order of the files in each pass
            random = make_random_state(self._seed, start.passes)
            order = random.permutation(self._reader.num_files).tolist()
        rows, after = self._reader.window(start.position, self._window_size, order)
        window = _Window(start, rows, after)
        if not self._is_lazy:
            for first in range(0, len(window.rows), ROWS):
                words = (self._seed, start.window, first)
                window.requests.append(self._request_tokens(words, window.rows[first : first + ROWS]))
        return window

    def _leave_out(self, bad: Sequence[tuple[Row, str]]) -> None:
        """List rows that cannot be trained on; unless they are skipped, raise :class:`DataError` for the first row."""
        if not bad:
            return
        row, reason = bad[0]
        problem = f"{row.location}: {reason.rstrip('.')}"
        if not self._skips:
            raise DataError(f"{problem}; correct it, or leave such rows out with on_bad_row=skip.")
        path = list_left_out([(row.origin, reason) for row, reason in bad])
        message = f"{problem}: it is left out"
        if path:
            message += f"; all such rows are listed in {path}"
        if num_left_out() <= 10:  # the list has all of them
            log_once(get_logger(), f"{message}.", logging.WARNING)

    def _report_omitted(self, rows: Sequence[Row], omitted: Mapping[str, int]) -> None:
        """Log a warning for each kind of text that the chat template leaves out of a row, once per kind."""
        for kind, number in omitted.items():
            if kind in self._reported_kinds:
                continue
            self._reported_kinds.add(kind)
            message = (
                f"{rows[number].location}: the chat template drops the {kind}, which is not trained on; further such "
                "rows are not named."
            )
            log_rank_zero(get_logger(), message, logging.WARNING)

    def _complete(self, window: _Window) -> None:
        """Collect the tokens of a window, pack and shuffle them, and keep the window."""
        batches = []
        for part, request in enumerate(window.requests):  # none if rows are tokenized one by one
            first = part * ROWS
            tokens = request()
            rows = window.rows[first : first + ROWS]
            self._leave_out([(rows[number], reason) for number, reason in tokens.bad])
            self._report_omitted(rows, tokens.omitted)
            batches.append(tokens.batch)
            window.numbers += [first + number for number in tokens.numbers]
        count = len(window.rows)
        if batches:
            window.store = TokenStore(batches)
            count = len(window.store)
            if self._capacity is not None:
                window.packs = self._pack(window, window.store.lengths)
                count = len(window.packs)
        # The order depends on the position alone, so that a resumed run shuffles the window as before.
        if self._shuffle:
            random = make_random_state(self._seed, window.start.passes, window.start.window)
            window.order = random.permutation(count)
        else:
            window.order = np.arange(count)
        self._windows[window.start.window] = window
        # The oldest windows go first; the newest ones are those that the next steps read.
        while len(self._windows) > _NUM_CACHED:
            del self._windows[min(self._windows)]

    def _pack(self, window: _Window, lengths: np.ndarray) -> list[list[Piece]]:
        """Return the packs of a window, whose token rows have ``lengths``, int64 ``[rows]``."""
        if self._splits:
            return split_evenly(lengths, self._capacity, self._longest)
        if len(lengths) and lengths.max() > self._capacity:
            location = window.rows[window.numbers[int(lengths.argmax())]].location
            raise DataError(f"{location}: {lengths.max():,} tokens fit into no pack of {self._capacity:,}.")
        return whole_rows(best_fit(lengths, self._capacity), lengths)
