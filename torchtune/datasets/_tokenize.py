"""Rows -> tokens and labels, in as many processes as there are cores."""

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tqdm import tqdm

from torchtune.data import DataError
from torchtune.datasets._bad_rows import BadRows
from torchtune.datasets._lines import Line, parsed, unparsed
from torchtune.datasets._parallel import in_parts
from torchtune.datasets._store import Writers, check_row, has_label
from torchtune.utils import UserError, get_logger, log_rank_zero, sign_of_life
from torchtune.utils._json_lines import refuse_halves

NO_LABEL = "no label is left"


@dataclass
class Tokenized:
    """Consecutive rows.

    Args:
        tokens: int32 [all tokens].
        labels: int32 [all tokens].
        lengths: int64 [rows].
    """

    tokens: np.ndarray
    labels: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> "Tokenized":
        """Of (tokens, labels) of every row."""
        tokens, labels = (np.concatenate([np.empty(0, np.int32), *(row[side] for row in rows)]) for side in (0, 1))
        return cls(tokens, labels, np.array([len(ids) for ids, _ in rows], np.int64))


@dataclass
class Part:
    """What became of some rows.

    Args:
        stores: the rows, by the name of what they have of each.
        notes: what there is to keep of each row besides.
        cut: rows that are as long as may be.
        bad: rows that cannot be trained on, and why.
        on_reading: a row has more than tokens: rows are to be transformed when they are read.
    """

    stores: dict[str, Tokenized] = field(default_factory=dict)
    notes: list[Any] = field(default_factory=list)
    cut: int = 0
    bad: list[tuple[int, str]] = field(default_factory=list)
    on_reading: bool = False


class OnReading(Exception):
    """Raised by what makes samples: rows are to be transformed when they are read."""


class Tokenize:
    """Makes token rows of a part of the rows.

    Args:
        samples: (number, row) -> samples with ``tokens``, ``labels`` and maybe a ``note``, by the names of the stores.
        names: of the stores.
        limit: longest row.
    """

    def __init__(
        self, samples: Callable[[int, Any], Mapping[str, Mapping[str, Any]]], names: Sequence[str], limit: int | None
    ) -> None:
        self._samples, self.names, self._limit = samples, names, limit

    def __call__(self, start: int, rows: Iterable[Any]) -> Part:
        """The part that begins with row ``start``."""
        found: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {name: [] for name in self.names}
        part = Part()
        for index, row in enumerate(unparsed(rows), start):
            sign_of_life()
            try:
                row = _columns(row)
                samples = self._samples(index, row)
                checked = {name: check_row(samples[name]["tokens"], samples[name]["labels"]) for name in self.names}
            except DataError as error:
                part.bad.append((index, str(error)))
                continue
            except RecursionError:
                part.bad.append((index, "it is nested too deeply"))
                continue
            except OnReading:
                part.on_reading = True
                return part
            for name, arrays in checked.items():
                found[name].append(arrays)
            part.cut += self._limit is not None and any(len(ids) >= self._limit for ids, _ in checked.values())
            part.notes += [sample["note"] for sample in samples.values() if "note" in sample]
        part.stores = {name: Tokenized.of(arrays) for name, arrays in found.items()}
        return part


def _columns(row: Any) -> Mapping[str, Any]:
    """The columns of a row. Raises :class:`DataError` where it has none, or no text that can be encoded."""
    if isinstance(row, Line):
        return parsed(row)
    if not isinstance(row, Mapping):
        raise DataError(f"a row must be a mapping column -> value, not {type(row).__name__}")
    try:
        refuse_halves(row)
    except UserError as error:
        raise DataError(str(error)) from error
    except (ValueError, RecursionError):
        pass  # data that contain themselves are the transform's affair
    return row


class TransformRows(Tokenize):
    """Makes one store of ``tokens`` and ``labels`` that a transform gives.

    Args:
        transform: of a row.
        limit: longest row.
        side: end of rows that is cut.
        notes: the transform gives a ``note``, too.
    """

    def __init__(
        self,
        transform: Callable[[Mapping[str, Any]], Mapping[str, Any]],
        limit: int | None,
        side: str = "right",
        notes: bool = False,
    ) -> None:
        super().__init__(self._transformed, ["rows"], limit)
        self._transform = transform
        self._known = {"tokens", "labels", "note"} if notes else {"tokens", "labels"}
        self._why = "the prompt is too long" if side == "right" else "what is trained on comes before the cut"

    def _transformed(self, index: int, row: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        sample = self._transform(row)
        if sample.keys() - {*self._known, *row}:
            raise OnReading
        if not has_label(sample):
            is_full = self._limit is not None and len(sample["tokens"]) >= self._limit
            raise DataError(NO_LABEL + (f" within max_seq_len={self._limit}, {self._why}" if is_full else ""))
        return {"rows": {name: sample[name] for name in self._known}}


def tokenize_rows(rows: Any, work: Tokenize, bad: BadRows, writers: Writers) -> dict[str, Any]:
    """Write the tokens of every row, with a progress bar; many rows are worked on in several processes.

    Args:
        rows: mappings column -> value.
        work: makes token rows.
        bad: takes the rows that cannot be trained on.
        writers: take the token rows, by name; what they have from before a kill is not worked on again.

    Returns:
        ``cut``: how many rows are as long as may be; ``notes`` of the rows; or ``on_reading`` where a row has more
        than tokens.

    Raises:
        DataError: some rows cannot be trained on and are not left out; the message names up to ten.
    """
    cut, notes, found_bad, done = 0, [], [], 0
    for then in writers.before:
        cut, done = cut + then["cut"], then["done"]
        notes += then["notes"]
        found_bad += then["bad"]
    for index, reason in found_bad:
        bad.add(index, reason)
    if done:
        going_on = f"Going on behind {done:,} rows that were tokenized before."
        log_rank_zero(get_logger(), going_on, logging.WARNING)  # as a command shows no less
    noted = (cut, len(notes), len(found_bad))
    hidden = True if os.environ.get("GROUP_RANK", "0") != "0" else None  # None: only on a terminal
    with tqdm(total=len(rows), initial=done, desc="Tokenizing", unit=" rows", disable=hidden) as bar:
        for part in in_parts(rows, work, done):
            sign_of_life()
            if part.on_reading:
                return {"on_reading": True}
            for index, reason in part.bad:
                bad.add(index, reason)
            found_bad += part.bad
            count = 0
            for name, found in part.stores.items():
                writers[name].extend(found.tokens, found.labels, found.lengths)
                count = len(found.lengths)
            cut += part.cut
            notes += part.notes
            bar.update(count + len(part.bad))
            done += count + len(part.bad)
            if writers.is_due():
                new = {"cut": cut - noted[0], "notes": notes[noted[1] :], "bad": found_bad[noted[2] :]}
                writers.note({"done": done, **new})
                noted = (cut, len(notes), len(found_bad))
    bad.check()
    return {"cut": cut, "notes": notes}
