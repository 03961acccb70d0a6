"""Parallel tokenization of rows."""

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from torchtune.data import DataError
from torchtune.datasets._bad_rows import BadRows
from torchtune.datasets._fingerprint import Fingerprint
from torchtune.datasets._lines import Line, parsed, unparsed
from torchtune.datasets._processes import in_parts
from torchtune.datasets._row_source import RowSource
from torchtune.datasets._shared import prepare
from torchtune.datasets._token_store import PreparedRows, RowWriter, check_row, has_label, make_batch
from torchtune.utils import UserError, check_surrogates, get_logger, log_rank_zero, sign_of_life

NO_LABEL = "no label is left"


class OnReading(Exception):
    """Raised if a row has more than tokens, so that rows must be transformed when they are read."""


class Tokenize:
    """Callable that tokenizes consecutive rows.

    Args:
        samples: (number, row) -> sample per store name, with ``tokens``, ``labels`` and optionally ``note``; or a list
            of these, if a row gives several.
        names: names of the stores.
        limit: maximum row length in tokens, to detect truncated rows.
    """

    def __init__(
        self, samples: Callable[[int, Any], Mapping[str, Mapping[str, Any]]], names: Sequence[str], limit: int | None
    ) -> None:
        self._samples, self.names, self._limit = samples, names, limit

    def __call__(
        self, start: int, rows: Iterable[Any], place: Callable[[int], str] = "row {}".format
    ) -> tuple[pa.RecordBatch, dict[str, Any]]:
        """Tokenize the rows from number ``start`` on; ``place`` names a row for the watchdog.

        Returns:
            The token rows, and facts about the rows (see :class:`PreparedRows`).
        """
        columns: dict[str, list[np.ndarray]] = {
            f"{name}.{kind}": [] for name in self.names for kind in ("tokens", "labels")
        }
        bad: list[tuple[int, str]] = []
        facts: dict[str, Any] = {"rows": 0, "bad": bad, "cut": 0, "notes": [], "several": []}
        for index, row in enumerate(unparsed(rows), start):
            sign_of_life(place(index))
            facts["rows"] += 1
            try:
                found = self._samples(index, _columns(row))
                found = found if isinstance(found, list) else [found]
                many = [
                    [ids for name in self.names for ids in check_row(each[name]["tokens"], each[name]["labels"])]
                    for each in found
                ]
            except DataError as error:
                bad.append((index, str(error)))
                continue
            except RecursionError:
                bad.append((index, "it is nested too deeply"))
                continue
            for arrays in many:
                for column, ids in zip(columns.values(), arrays, strict=True):
                    column.append(ids)
                facts["cut"] += self._limit is not None and any(len(ids) >= self._limit for ids in arrays)
            facts["several"] += [(index, len(many))] * (len(many) > 1)
            facts["notes"] += [sample["note"] for samples in found for sample in samples.values() if "note" in sample]
        sign_of_life()
        return make_batch(columns), facts


def _columns(row: Any) -> Mapping[str, Any]:
    """Return a row's columns; raise :class:`DataError` if it is no mapping or has text that cannot be encoded."""
    if isinstance(row, Line):
        return parsed(row)
    if not isinstance(row, Mapping):
        raise DataError(f"a row must be a mapping column -> value, not {type(row).__name__}")
    try:
        check_surrogates(row)
    except UserError as error:
        raise DataError(str(error)) from error
    except (ValueError, RecursionError):
        pass  # recursive data: left to the transform
    return row


class TransformRows(Tokenize):
    """Callable that tokenizes rows into one store, with a transform that returns ``tokens`` and ``labels``.

    Args:
        transform: function of a row.
        limit: maximum row length in tokens, to detect truncated rows.
        side: side that the transform truncates, for the error message.
        notes: whether the transform returns a ``note`` as well.
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

    def _transformed(self, index: int, row: Mapping[str, Any]) -> list[dict[str, Mapping[str, Any]]]:
        found = self._transform(row)
        samples = found if isinstance(found, list) else [found]
        if any(sample.keys() - {*self._known, *row} for sample in samples):
            raise OnReading
        trained = [sample for sample in samples if has_label(sample)]
        if not trained:
            sample = samples[0]
            is_full = self._limit is not None and len(sample["tokens"]) >= self._limit
            raise DataError(NO_LABEL + (f" within max_seq_len={self._limit}, {self._why}" if is_full else ""))
        return [{"rows": {name: sample[name] for name in self._known}} for sample in trained]


def tokenize_rows(rows: Any, work: Tokenize, bad: BadRows, writer: RowWriter) -> None:
    """Write the tokens of all rows, with a progress bar; many rows are tokenized in several processes.

    Args:
        rows: mappings column -> value.
        work: tokenizes rows.
        bad: collects the rows that cannot be trained on.
        writer: writes the token rows; rows from before a kill are not tokenized again.

    Raises:
        DataError: some rows cannot be trained on and are not skipped; the message names up to ten.
        OnReading: a row has more than tokens.
    """
    done = sum(rows for rows, _ in writer.before.sums)
    for index, reason in writer.before.bad:
        bad.add(index, reason)
    if done:
        going_on = f"Going on behind {done:,} rows that were tokenized before."
        log_rank_zero(get_logger(), going_on, logging.WARNING)  # commands show no lower level
    hidden = True if os.environ.get("GROUP_RANK", "0") != "0" else None  # None: only on a terminal
    with tqdm(total=len(rows), initial=done, desc="Tokenizing", unit=" rows", disable=hidden) as bar:
        for batch, facts in in_parts(rows, work, done):
            sign_of_life()
            for index, reason in facts["bad"]:
                bad.add(index, reason)
            writer.write(batch, facts)
            bar.update(facts["rows"])
    bad.check()


def prepare_rows(found: RowSource, depends_on: Mapping[str, Any], work: Tokenize, **bad: Any) -> PreparedRows:
    """:func:`prepare` the tokens of every row of a source.

    Args:
        found: the source.
        depends_on: name -> value of what rows depend on beside the source.
        work: makes token rows.
        **bad: arguments of :class:`BadRows`.
    """
    fingerprint = Fingerprint(depends_on)
    found.add_to(fingerprint)

    def build(writer: RowWriter) -> None:
        rows = found.rows()
        tokenize_rows(rows, work, BadRows(found.shown, rows=rows, **bad), writer)

    return prepare(fingerprint, found.shown, build, found.prepared)
