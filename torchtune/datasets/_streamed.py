"""Datasets that are read and tokenized during training."""

import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import Dataset

from torchtune.data import DataError, make_random_state, seeded_generators
from torchtune.datasets._bad_rows import list_left_out, num_left_out
from torchtune.datasets._packed import Piece, best_fit, split_evenly
from torchtune.datasets._prefetch import Ahead
from torchtune.datasets._processes import processes, that_travels
from torchtune.datasets._read import Position, Row, open_reader
from torchtune.datasets._token_store import TokenStore
from torchtune.datasets._tokenize import OnReading, TransformRows
from torchtune.utils import get_logger, log_once, log_rank_zero, sign_of_life

_KEPT = 3  # cached windows
_SMALL = 1 << 22  # bytes; smaller sources are not worth a process


class _Start(NamedTuple):
    """Start of a window: its first example, its number, completed passes over the data, position in the source."""

    example: int
    window: int
    passes: int
    position: Position


_BEGINNING = _Start(0, 0, 0, None)


class _Example(NamedTuple):
    """Tokens and labels, int32 ``[s]``, and for a pack the length of each document."""

    tokens: np.ndarray
    labels: np.ndarray
    lengths: list[int] | None


class _Given(NamedTuple):
    """Result of the worker process: an example or an error, calls to repeat in this process, and window starts."""

    example: _Example | None
    error: Exception | None
    said: list[tuple[str, tuple[Any, ...]]]
    starts: list[_Start]


class _Window:
    """Consecutive rows that are shuffled and packed together."""

    def __init__(self, start: _Start, rows: list[Row], after: Position) -> None:
        self.start, self.rows, self.after = start, rows, after
        self.parts: list[pa.RecordBatch] = []
        self.places: list[int] = []  # rows that were not filtered
        self.done = 0
        self.store: TokenStore | None = None
        self.packs: list[list[Piece]] = []
        self.order = np.empty(0, np.int64)  # position -> row or pack


class StreamedDataset(Dataset):
    """Dataset of a source that is larger than memory, read and tokenized during training.

    The source is read in windows of ``shuffle_buffer`` rows; each window is shuffled and packed separately. Indices
    count the examples of the whole run and are endless: after the last row the source is read again in another order.
    Every rank reads all rows. Without packing, filter and skipping it parses and tokenizes only the rows of this rank's
    examples; otherwise all rows, a part of the next window with each example. Therefore the examples do not depend on
    the number of ranks, and a resume reads the source from the saved position on.

    For sources above 4 MB, :meth:`begin` forks a worker process that tokenizes the examples of :meth:`read_ahead` in
    advance. The fork keeps the memory of its parent: create the dataset before the model.

    Args:
        transform: row -> ``tokens`` and ``labels``.
        source: Hub dataset, folder or file.
        limit: maximum row length in tokens that ``transform`` truncates to; ``None`` if it does not truncate.
        side: side that ``transform`` truncates, ``"right"`` or ``"left"``.
        pack_length: maximum number of tokens per pack; ``None`` disables packing.
        split_across_pack: fill packs completely by splitting rows.
        filter_fn: function of a row; rows for which it returns False are dropped.
        shuffle_buffer: number of rows per window.
        on_bad_row: ``stop`` at a row that cannot be trained on, or ``skip`` and list such rows.
        prepared: must be None.
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
        pack_length: int | None = None,
        split_across_pack: bool = False,
        filter_fn: Callable[[Mapping[str, Any]], bool] | None = None,
        shuffle_buffer: int = 10_000,
        on_bad_row: Literal["stop", "skip"] = "stop",
        prepared: str | None = None,
        streaming: bool = True,
        **load_dataset_kwargs: Any,
    ) -> None:
        if shuffle_buffer < 1:
            raise DataError(f"shuffle_buffer must be at least 1, not {shuffle_buffer}.")
        if on_bad_row not in ("stop", "skip"):
            raise DataError(f"on_bad_row must be stop or skip, not '{on_bad_row}'.")
        if prepared is not None:
            raise DataError("prepared data are read from disk as they are needed: leave streaming out.")
        self._reader, self.source = open_reader(source, **load_dataset_kwargs)
        self._tokenize = TransformRows(transform, limit, side)
        self._filter, self._rows = filter_fn, shuffle_buffer
        self._capacity, self._splits = pack_length, split_across_pack
        self._skips = on_bad_row == "skip"
        self._is_lazy = pack_length is None and filter_fn is None and not self._skips
        self.fingerprint = f"{self._reader.fingerprint()} in windows of {shuffle_buffer} rows, on_bad_row={on_bad_row}"
        self._ahead: Ahead | None = None
        self._said: list[tuple[str, tuple[Any, ...]]] | None = None  # only in the worker process
        self._begin(0, False)

    def begin(self, seed: int, *, shuffle: bool) -> None:
        """Move to the first example; the order depends on ``seed`` if ``shuffle``."""
        self._begin(seed, shuffle)
        if self._other() is None and (self._reader.size is None or self._reader.size > _SMALL) and processes() > 1:
            way_out = "free some and resume, or start a new run with a smaller shuffle_buffer"
            try:
                self._ahead = Ahead(self, f"tokenizes {self.source}", way_out)
            except OSError as error:
                said = f"No process can be started to tokenize {self.source} ahead ({error.strerror})"
                get_logger().warning(f"{said}: the training process does it, and its steps take longer.")

    def _begin(self, seed: int, shuffle: bool, start: _Start = _BEGINNING) -> None:
        self._seed, self._shuffle = seed, shuffle
        self._starts = [start]
        self._windows: dict[int, _Window] = {}
        self._next: _Window | None = None
        self._coming: dict[int, int] = {}  # index -> ticket
        self._given: dict[int, _Given] = {}
        if (ahead := self._other()) is not None:
            ahead.forget()
            ahead.ask("_begin", [(seed, shuffle, start)])

    def _other(self) -> Ahead | None:
        """Return this process's worker; None in a forked copy."""
        return self._ahead if self._ahead is not None and self._ahead.is_here else None

    def state_at(self, index: int) -> dict[str, Any]:
        """Return the start of the window of an example that was read or is next, as plain data."""
        return self._starts[self._number(index)]._asdict()

    def go_to(self, state: Mapping[str, Any]) -> None:
        """Restore a state that :meth:`state_at` returned."""
        self._begin(self._seed, self._shuffle, _Start(**state))

    def read_ahead(self, steps: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
        """Request the next examples from the worker process, if there is one.

        Args:
            steps: (seed of the transform's random numbers, indices in reading order) of each step.
        """
        if (ahead := self._other()) is not None:
            for ticket, (_, indices) in zip(ahead.ask("_give", steps), steps, strict=True):
                self._coming |= dict.fromkeys(indices, ticket)

    def __getitem__(self, index: int) -> Any:
        """Return an example, ``tokens`` and ``labels``, or a pack, as map-style datasets do."""
        ahead = self._other()
        tokens, labels, lengths = self._example(index) if ahead is None else self._received(index, ahead)
        if lengths is None:
            return {"tokens": tokens.tolist(), "labels": labels.tolist()}
        parts = [torch.from_numpy(values.astype(np.int64)).split(lengths) for values in (tokens, labels)]
        return [{"tokens": ids, "labels": targets} for ids, targets in zip(*parts, strict=True)]

    def _received(self, index: int, ahead: Ahead) -> _Example:
        """Return an example from the worker process."""
        while (given := self._given.pop(index, None)) is None:
            ticket = self._coming.get(index)
            if ticket is None:  # not requested yet
                (ticket,) = ahead.ask("_give", [((), [index])])
            self._given |= ahead.answer(ticket)
            self._coming = {other: its for other, its in self._coming.items() if its != ticket}
        self._starts += [start for start in given.starts if start.window > self._starts[-1].window]
        for method, arguments in given.said:
            getattr(self, method)(*arguments)
        if given.error is not None:
            raise given.error
        return given.example

    def _give(self, words: Sequence[int], indices: Sequence[int]) -> dict[int, _Given]:
        """Tokenize examples up to the first error, in the worker process."""
        found = {}
        with seeded_generators(*words) if words else nullcontext():
            for index in indices:
                example, error, starts = None, None, []
                self._said = []
                try:
                    example = self._example(index)
                    number = self._number(index)
                    starts = self._starts[number : number + 2]
                except Exception as failure:  # noqa: BLE001  (raised where the example is read)
                    error = that_travels(failure)
                found[index] = _Given(example, error, self._said, starts)
                if error is not None:
                    break
        return found

    def _say(self, method: str, *arguments: Any) -> None:
        """Call a method in the training process, when it reads this example."""
        if self._said is None:
            getattr(self, method)(*arguments)
        else:
            self._said.append((method, arguments))

    def _example(self, index: int) -> _Example:
        window, place = self._find(index)
        self._prepare(window, (place + 1) / len(window.order))
        item = int(window.order[place])
        if self._is_lazy:
            part, _ = self._transformed(window, [item])
            return _Example(*TokenStore([part]).arrays(0), None)
        if not window.packs:
            return _Example(*window.store.arrays(item), None)
        pieces = [[side[start:end] for side in window.store.arrays(row)] for row, start, end in window.packs[item]]
        tokens, labels = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
        return _Example(tokens, labels, [end - start for _, start, end in window.packs[item]])

    def origins(self, index: int) -> list[dict[str, Any]]:
        """Return ``source``, and ``line`` or ``row`` counted from 1, of each document of an example."""
        if (ahead := self._other()) is not None:
            return ahead.answer(*ahead.ask("origins", [(index,)]))
        window, place = self._find(index)
        item = int(window.order[place])
        rows = [row for row, _, _ in window.packs[item]] if window.packs else [item]
        return [window.rows[row if self._is_lazy else window.places[row]].origin for row in rows]

    def _number(self, index: int) -> int:
        number = bisect_right(self._starts, index, key=lambda start: start.example) - 1
        if number < 0:
            raise IndexError(f"example {index} comes before the position {self._starts[0].example}")
        return number

    def _find(self, index: int) -> tuple[_Window, int]:
        """Return the completed window of an example and the example's position in it."""
        while (number := self._number(index)) == len(self._starts) - 1:
            self._extend()
        start = self._starts[number]
        window = self._windows.get(start.window)
        if window is None:
            window = self._finished(self._read(start))
            self._keep(window)
        return window, index - start.example

    def _extend(self) -> None:
        """Complete the next window."""
        start = self._starts[-1]
        window = self._next if self._next is not None else self._read(start)
        self._next = None
        window.start = start
        self._finished(window)
        is_end = window.after is None
        if is_end:
            first = next((one for one in reversed(self._starts) if one.position is None), None)
            if first is not None and first.example == start.example + len(window.order):
                raise DataError(f"There are no rows in {self.source}.")
            self._say("_say_again")
        self._keep(window)
        passes = start.passes + is_end
        self._starts.append(_Start(start.example + len(window.order), start.window + 1, passes, window.after))

    def _say_again(self) -> None:
        log_rank_zero(get_logger(), f"{self.source} is read to its end: it is read again from its beginning.")

    def _keep(self, window: _Window) -> None:
        self._windows[window.start.window] = window
        while len(self._windows) > _KEPT:
            del self._windows[min(self._windows)]

    def _prepare(self, window: _Window, share: float) -> None:
        """Tokenize a fraction of the next window, so that it is complete when it is needed."""
        if self._is_lazy or window.start.window != self._starts[-1].window - 1:
            return
        if self._next is None:
            self._next = self._read(self._starts[-1])
        self._advance(self._next, math.ceil(share * len(self._next.rows)))

    def _read(self, start: _Start) -> _Window:
        order = None
        if self._shuffle and self._reader.files > 1:
            order = make_random_state(self._seed, start.passes).permutation(self._reader.files).tolist()
        return _Window(start, *self._reader.window(start.position, self._rows, order))

    def _advance(self, window: _Window, until: int) -> None:
        if window.done < until:
            part, places = self._transformed(window, range(window.done, until))
            window.parts.append(part)
            window.places += places
            window.done = until

    def _leave_out(self, rows: Sequence[tuple[Row, str]]) -> None:
        """List rows that cannot be trained on; raise :class:`DataError` for the first one unless they are skipped."""
        row, reason = rows[0]
        said = f"{row.place}: {reason.rstrip('.')}"
        if not self._skips:
            raise DataError(f"{said}; correct it, or leave such rows out with on_bad_row=skip.")
        self._say("_list", said, [(row.origin, reason) for row, reason in rows])

    def _list(self, said: str, rows: Sequence[tuple[Mapping[str, Any], str]]) -> None:
        path = list_left_out(rows)
        listed = f"; all such rows are listed in {path}" if path else ""
        if num_left_out() <= 10:
            log_once(get_logger(), f"{said}: it is left out{listed}.", logging.WARNING)

    def _transformed(self, window: _Window, numbers: Sequence[int]) -> tuple[pa.RecordBatch, list[int]]:
        """Tokenize rows of a window; return the token rows and their numbers in the window."""
        sign_of_life()
        rows, kept, bad = [], [], {}
        for number in numbers:
            try:
                row = window.rows[number].columns()
            except DataError as error:
                bad[number] = str(error)
                continue
            if self._filter is None or self._filter(row):
                rows.append(row)
                kept.append(number)
        first = 0 if window.start.example == 0 else 1
        try:
            batch, facts = self._tokenize(first, rows, lambda index: window.rows[kept[index - first]].place)
        except OnReading as error:
            said = f"{self.source}: rows with more than text cannot be streamed: leave streaming out."
            raise DataError(said) from error
        bad |= {kept[index - first]: reason for index, reason in facts["bad"]}
        if bad:
            self._leave_out([(window.rows[number], reason) for number, reason in sorted(bad.items())])
        return batch, [number for number in kept if number not in bad]

    def _finished(self, window: _Window) -> _Window:
        count = len(window.rows)
        if not self._is_lazy:
            self._advance(window, count)
            count = 0
            if window.parts:
                window.store = TokenStore(window.parts)
                window.packs = [] if self._capacity is None else self._packed(window, window.store.lengths)
                count = len(window.store) if self._capacity is None else len(window.packs)
        window.order = np.arange(count)
        if self._shuffle:
            window.order = make_random_state(self._seed, window.start.passes, window.start.window).permutation(count)
        return window

    def _packed(self, window: _Window, lengths: np.ndarray) -> list[list[Piece]]:
        if self._splits:
            return split_evenly(lengths, self._capacity)
        if len(lengths) and lengths.max() > self._capacity:
            place = window.rows[window.places[int(lengths.argmax())]].place
            raise DataError(f"{place}: {lengths.max():,} tokens fit into no pack of {self._capacity:,}.")
        return [[(row, 0, int(lengths[row])) for row in pack] for pack in best_fit(lengths, self._capacity)]
