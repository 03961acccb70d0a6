"""Parallel tokenization: of all rows before training, or of the rows of a stream."""

import logging
import os
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from torch.utils.data import Dataset
from tqdm import tqdm

from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, DataError
from torchtune.datasets._bad_rows import BadRows, say_what_is_left_out
from torchtune.datasets._file_formats import Line, parsed
from torchtune.datasets._file_rows import unparsed
from torchtune.datasets._fingerprint import Fingerprint
from torchtune.datasets._processes import in_parts
from torchtune.datasets._row_cache import prepare
from torchtune.datasets._row_source import RowSource
from torchtune.datasets._token_store import PreparedRows, RowWriter, TokenStore, make_batch
from torchtune.utils import UserError, check_surrogates, get_logger, log_rank_zero, sign_of_life

NO_LABEL = "no label is left"
_INT32 = np.iinfo(np.int32)
# Tokens of the longest row that the model reads.
_context: ContextVar[int | None] = ContextVar("context", default=None)


def shifted_labels(tokens: Sequence[int], mask: Sequence[bool]) -> list[int] | np.ndarray:
    """Return pre-shifted labels: label i is token i + 1, or -100 if that token is masked; the last label is -100.

    Returns:
        a list; int32 ``[s]`` if ``tokens`` is an ``array("i")``.

    Raises:
        DataError: tokens and mask differ in length.
    """
    if len(tokens) != len(mask):
        raise DataError(f"the model transform gives {len(tokens)} tokens but {len(mask)} elements of a mask")
    ids, is_trained = _array(tokens), ~np.asarray(mask, bool)[1:]
    labels = np.full_like(ids, CROSS_ENTROPY_IGNORE_IDX)
    labels[:-1][is_trained] = ids[1:][is_trained]
    return labels if isinstance(tokens, array) else labels.tolist()


def has_label(sample: Mapping[str, Any]) -> bool:
    """Return whether a sample has a label that is not ignored."""
    return bool((np.asarray(sample["labels"]) != CROSS_ENTROPY_IGNORE_IDX).any())


def check_row(tokens: Any, labels: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and labels as int32 ``[s]``; raise :class:`DataError` unless both are ids of equal length."""
    for name, values in (("tokens", tokens), ("labels", labels)):
        if not hasattr(values, "__len__") or isinstance(values, str | bytes | Mapping):
            raise DataError(f"{name} must be a list of token ids, not {type(values).__name__}")
    if len(tokens) != len(labels):
        raise DataError(f"a row has {len(tokens)} tokens but {len(labels)} labels")
    ids, targets = _array(tokens), _array(labels)
    for name, values in (("tokens", ids), ("labels", targets)):
        if len(values) and values.dtype.kind not in "iu":
            raise DataError(f"{name} must be a flat list of whole numbers, not of {values.dtype}")
    if len(ids) and (ids.min() < 0 or ids.max() > _INT32.max):
        raise DataError(f"token id {ids.min() if ids.min() < 0 else ids.max()} is none")
    odd = targets[(targets < 0) & (targets != CROSS_ENTROPY_IGNORE_IDX)]
    if len(odd):
        raise DataError(f"label {odd.min()} is neither a token id nor {CROSS_ENTROPY_IGNORE_IDX}")
    return ids.astype(np.int32, copy=False), targets.astype(np.int32, copy=False)


def _array(values: Any) -> np.ndarray:
    try:
        found = np.asarray(values)
    except ValueError:  # ragged lists
        found = np.empty((0, 0))
    if found.ndim != 1:
        raise DataError("tokens and labels must be flat lists of token ids")
    return found


@contextmanager
def rows_up_to(length: int | None) -> Iterator[None]:
    """Make datasets that are built inside the block refuse, or skip, rows of more tokens; None: no limit."""
    token = _context.set(length)
    try:
        yield
    finally:
        _context.reset(token)


def longest_row() -> int | None:
    """Return the limit of the :func:`rows_up_to` block; None without a limit."""
    return _context.get()


def _too_long(longest: int, *, is_prompt: bool = False) -> str:
    """Return the reason why a row cannot be trained on that has more tokens than a model reads."""
    fact = f"it has more tokens than the {longest:,} that the model reads (its max_seq_len): shorten it"
    return fact if is_prompt else f"{fact}, or truncate rows with tokenizer.max_seq_len={longest}"


class OnReading(Exception):
    """Raised if a transform returns more than tokens, so that rows must be transformed when they are read."""


class Tokenize:
    """Callable that tokenizes consecutive rows.

    Args:
        samples: row -> sample per store name, with ``tokens``, ``labels`` and optionally ``note``; or a list of such
            mappings, if a row has several samples.
        names: names of the stores.
        tokenizer: the tokenizer that ``samples`` calls; its ``take_omitted``, if any, says what it leaves out of a row.
        longest: maximum number of tokens of a row; None for no limit.
    """

    def __init__(
        self,
        samples: Callable[[Any], Mapping[str, Mapping[str, Any]]],
        names: Sequence[str],
        tokenizer: Any = None,
        longest: int | None = None,
    ) -> None:
        self._samples, self.names, self._longest = samples, names, longest
        self._take_omitted: Callable[[], list[str]] = getattr(tokenizer, "take_omitted", list)

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
        facts: dict[str, Any] = {"rows": 0, "numbers": [], "bad": [], "notes": [], "omitted": {}}
        for index, row in enumerate(unparsed(rows), start):
            sign_of_life(place(index))
            facts["rows"] += 1
            self._take_omitted()  # of texts that were tokenized for something else
            try:
                found = self._samples(_columns(row))
                found = found if isinstance(found, list) else [found]
                checked = [
                    [ids for name in self.names for ids in check_row(each[name]["tokens"], each[name]["labels"])]
                    for each in found
                ]
                length = max(len(ids) for arrays in checked for ids in arrays) if checked and self.names else 0
                if self._longest is not None and length > self._longest:
                    raise DataError(_too_long(self._longest))
            except DataError as error:
                facts["bad"].append((index, str(error)))
                continue
            except RecursionError:
                facts["bad"].append((index, "it is nested too deeply"))
                continue
            for kind in self._take_omitted():
                facts["omitted"].setdefault(kind, []).append(index)
            for arrays in checked:
                for column, ids in zip(columns.values(), arrays, strict=True):
                    column.append(ids)
            facts["numbers"] += [index] * len(checked)
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
        transform: row -> ``tokens``, ``labels`` and optionally ``note``, or a list of such samples. Further outputs
            that are not columns of the row raise :class:`OnReading`.
        limit: maximum row length in tokens that the transform truncates to, for the error message.
        side: side that the transform truncates, ``"right"`` or ``"left"``, for the error message.
        notes: whether the transform returns a ``note`` as well.
        tokenizer: see :class:`Tokenize`.
        longest: see :class:`Tokenize`.
    """

    def __init__(
        self,
        transform: Callable[[Mapping[str, Any]], Mapping[str, Any]],
        limit: int | None,
        side: str = "right",
        notes: bool = False,
        tokenizer: Any = None,
        longest: int | None = None,
    ) -> None:
        super().__init__(self._transformed, ["rows"], tokenizer, longest)
        self._transform, self._limit = transform, limit
        self._known = {"tokens", "labels", "note"} if notes else {"tokens", "labels"}
        self._why = "the prompt is too long" if side == "right" else "what is trained on comes before the cut"

    def _transformed(self, row: Mapping[str, Any]) -> list[dict[str, Mapping[str, Any]]]:
        found = self._transform(row)
        samples = found if isinstance(found, list) else [found]
        if any(sample.keys() - {*self._known, *row} for sample in samples):
            raise OnReading
        trained = [sample for sample in samples if has_label(sample)]
        if not trained:
            raise DataError(NO_LABEL + why_no_label(samples[0], self._limit, self._why))
        return [{"rows": {name: sample[name] for name in self._known}} for sample in trained]


def why_no_label(sample: Mapping[str, Any], limit: int | None, why: str) -> str:
    """Return the end of a message about a sample without labels: ``why``, if it was truncated to ``limit``."""
    return f" within max_seq_len={limit}, {why}" if limit is not None and len(sample["tokens"]) >= limit else ""


def _write_rows(rows: Any, work: Tokenize, bad: BadRows, writer: RowWriter) -> None:
    """Write the tokens of all rows, with a progress bar; many rows are tokenized in several processes.

    Rows that a killed process has written are not tokenized again.

    Raises:
        DataError: some rows cannot be trained on and are not skipped; the message names up to ten.
        OnReading: a row has more than tokens.
    """
    done = writer.before.total
    for index, reason in writer.before.bad:
        bad.add(index, reason)
    if done:
        going_on = f"Going on behind {done:,} rows that were tokenized before."
        log_rank_zero(get_logger(), going_on, logging.WARNING)  # commands only show warnings and errors
    hidden = True if os.environ.get("GROUP_RANK", "0") != "0" else None  # None: show it only on a terminal
    with tqdm(total=len(rows), initial=done, desc="Tokenizing", unit=" rows", disable=hidden) as bar:
        for batch, facts in in_parts(rows, work, done):
            sign_of_life()
            for index, reason in facts["bad"]:
                bad.add(index, reason)
            writer.write(batch, facts)
            bar.update(facts["rows"])
    bad.check()


def _describe_omitted(rows: PreparedRows) -> str:
    """Return what the chat template leaves out, such as "drops the reasoning of 3 of 8 rows"; empty for nothing."""
    if not rows.omitted:
        return ""
    kinds = [f"the {kind} of {count:,}" for kind, count in sorted(rows.omitted.items())]
    return f"the chat template drops {', '.join(kinds)} of {rows.total:,} rows"


class TokenizedDataset(Dataset):
    """Base class of datasets that tokenize all rows at construction, or map the rows of an earlier run.

    Attributes:
        omitted: what the chat template leaves out of how many rows, for people; empty if it writes everything.
        source: name of the source.
        stores: name -> token rows.
        dropped: rows of the source that are left out, because they cannot be trained on.
        num_truncated: number of rows that have as many tokens as the tokenizer's ``max_seq_len``, or were cut to it.
    """

    dropped: Sequence[int] = ()
    num_truncated: int = 0

    _names: ClassVar[tuple[str, ...]] = ("rows",)
    _has_prompts: ClassVar[bool] = False  # which are never truncated
    omitted: str = ""

    def _prepare(
        self,
        found: RowSource,
        depends_on: Mapping[str, Any],
        work: Tokenize,
        *,
        limit: int | None,
        load: Callable[[], Any] | None = None,
        skips: bool = False,
        way_out: str = "on_bad_row=skip",
        is_exact: bool = True,
        is_split: bool = False,
        formats: Collection[str] = (),
    ) -> PreparedRows:
        """Set the attributes and return the rows.

        Args:
            found: the source.
            depends_on: name -> value of everything that determines the rows, except the source and the class.
            work: tokenizes the rows.
            limit: maximum row length in tokens, to report truncated rows.
            load: loads the rows; by default from the source.
            skips: skip rows that cannot be trained on.
            way_out: the setting that skips such rows, for messages.
            is_exact: whether ``depends_on`` is complete, so that other runs can reuse the rows.
            is_split: whether packing divides long rows, so that they need not fit the model.
            formats: formats of rows that the dataset reads, for messages; empty if it may read any.

        Raises:
            DataError: some rows cannot be trained on and are not skipped, or none is left.
            OnReading: a row has more than tokens.
        """
        self.source = found.shown
        fingerprint = Fingerprint({"dataset": type(self), **depends_on})
        found.add_to(fingerprint)
        fingerprint.is_exact = fingerprint.is_exact and is_exact

        def build(writer: RowWriter) -> None:
            rows = (load or found.rows)()
            bad = BadRows(self.source, rows, skips=skips, way_out=way_out, formats=formats)
            _write_rows(rows, work, bad, writer)

        rows = prepare(fingerprint, self.source, build, found.prepared)
        if not is_split and (long := self._long_rows(rows)):
            if not skips:
                bad = BadRows(self.source, (load or found.rows)(), skips=False, way_out=way_out)
                for row, reason in long.items():
                    bad.add(int(rows.numbers[row]), reason)
                bad.check()
            rows = rows.without(long)
        self.dropped = [row for row, _ in rows.bad]
        self.stores = {name: rows.store(name) for name in self._names}
        self._numbers = rows.numbers
        say_what_is_left_out(rows.bad, self.source, rows.total)
        self.omitted = _describe_omitted(rows)
        if self.omitted:
            log_rank_zero(get_logger(), f"{self.source}: {self.omitted}: it is not trained on.", logging.WARNING)
        if limit is not None:
            longest = np.max([store.lengths for store in self.stores.values()], axis=0)
            self.num_truncated = int((longest >= limit).sum())
            if self.num_truncated:
                said = (
                    f"{self.num_truncated} of {len(self)} rows of {self.source} are as long as max_seq_len={limit} or "
                    "were cut to it"
                )
                log_rank_zero(get_logger(), f"{said}.", logging.WARNING)
        return rows

    def _long_rows(self, rows: PreparedRows) -> dict[int, str]:
        """Return the token rows that are too long for the model, with the reason.

        The cached rows do not depend on the model, so that they are compared here.
        """
        longest = longest_row()
        if longest is None:
            return {}
        lengths = np.max([rows.store(name).lengths for name in self._names], axis=0)
        reason = _too_long(longest, is_prompt=self._has_prompts)
        return {int(row): reason for row in np.flatnonzero(lengths > longest)}

    @property
    def store(self) -> TokenStore | None:
        """The token rows; ``None`` if there are several stores, or none."""
        return self.stores.get("rows")

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each row, int64 ``[rows]``."""
        return sum(store.lengths for store in self.stores.values())

    @property
    def fingerprint(self) -> int | tuple[int, ...]:
        """Digest of all tokens and labels."""
        return self.store.fingerprint

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return ``tokens`` and pre-shifted ``labels``."""
        return self.store.lists(index)

    def origins(self, index: int) -> list[dict[str, Any]]:
        """Return ``source`` and ``row`` (counted from 0, after ``filter_fn``) of an example."""
        return [{"source": self.source, "row": int(self._numbers[index])}]
