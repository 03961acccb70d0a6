"""Tokenization of rows, in parallel: of all rows before training, or of a few rows of a stream.

Labels are the tokens to predict at each position, or -100 where no token is trained on. A transform to messages masks
turns (:func:`torchtune.data.mask_messages`), the tokenizer masks the tokens of these turns, and :func:`shifted_labels`
turns tokens and mask into labels. Other places that decide on labels: ``datasets/_text_completion.py`` labels all
tokens, ``tokenizers/_earlier_reasoning.py`` masks the earlier turns of split conversations,
``models/_image_transform.py`` masks turns with images, and ``rlhf/_rollouts.py`` labels answers.
"""

import logging
import os
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, Conversation, DataError, ExampleDataset
from torchtune.datasets._bad_rows import BadRows, report_left_out
from torchtune.datasets._command_modes import ShardWritten, current_shard
from torchtune.datasets._data_files import decoded_rows
from torchtune.datasets._processes import in_parts
from torchtune.datasets._row_cache import cache_entry
from torchtune.datasets._row_source import RowSource
from torchtune.datasets._shards import record_of
from torchtune.datasets._token_store import PreparedRows, RowWriter, TokenStore, make_batch
from torchtune.utils import get_logger, log_rank_zero, sign_of_life

NO_LABEL = "no label is left"
_LARGEST_ID = np.iinfo(np.int32).max


def shifted_labels(tokens: Sequence[int], mask: Sequence[bool]) -> list[int] | np.ndarray:
    """Return pre-shifted labels: label i is token i + 1, or -100 if that token is masked; the last label is -100.

    Returns:
        a list; int32 ``[s]`` if ``tokens`` is an ``array("i")``.

    Raises:
        DataError: tokens and mask differ in length.
    """
    if len(tokens) != len(mask):
        raise DataError(f"the model transform gives {len(tokens)} tokens but {len(mask)} elements of a mask")
    ids = _flat_array(tokens)
    is_trained = ~np.asarray(mask, bool)[1:]
    labels = np.full_like(ids, CROSS_ENTROPY_IGNORE_IDX)
    labels[:-1][is_trained] = ids[1:][is_trained]
    if isinstance(tokens, array):
        return labels
    return labels.tolist()


def has_label(sample: Mapping[str, Any]) -> bool:
    """Return whether a sample has a label that is not ignored."""
    return bool((np.asarray(sample["labels"]) != CROSS_ENTROPY_IGNORE_IDX).any())


def why_no_label(sample: Mapping[str, Any], limit: int | None, reason: str) -> str:
    """Return the end of a message about a sample without labels: ``reason``, if it was truncated to ``limit``."""
    if limit is None or len(sample["tokens"]) < limit:
        return ""
    return f" within max_seq_len={limit}, {reason}"


def check_label_weights(weights: Any, labels: np.ndarray) -> np.ndarray:
    """Return the weights of labels ``[s]`` as float32 ``[s]``; empty for None, which is weight 1 for all.

    Raises:
        DataError: there is not one number of at least 0 for each label, or all labels have weight 0.
    """
    if weights is None:
        return np.empty(0, np.float32)
    try:
        weights = np.asarray(weights, np.float32)
    except (ValueError, TypeError) as error:
        raise DataError("label_weights must be a flat list of numbers") from error
    if weights.shape != labels.shape:
        raise DataError(f"a row has {len(labels)} labels, but label_weights of shape {weights.shape}")
    if not (np.isfinite(weights) & (weights >= 0)).all():
        raise DataError("label_weights must be numbers of at least 0")
    if not weights[labels != CROSS_ENTROPY_IGNORE_IDX].any():
        raise DataError("all labels have weight 0")
    return weights


def check_row(tokens: Any, labels: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and labels as int32 ``[s]``; raise :class:`DataError` unless both are ids of equal length."""
    for name, values in (("tokens", tokens), ("labels", labels)):
        if not hasattr(values, "__len__") or isinstance(values, str | bytes | Mapping):
            raise DataError(f"{name} must be a list of token ids, not {type(values).__name__}")
    if len(tokens) != len(labels):
        raise DataError(f"a row has {len(tokens)} tokens but {len(labels)} labels")
    token_ids = _flat_array(tokens)
    label_ids = _flat_array(labels)
    for name, ids in (("tokens", token_ids), ("labels", label_ids)):
        if len(ids) and ids.dtype.kind not in "iu":  # an array of nothing is float64
            raise DataError(f"{name} must be a flat list of whole numbers, not of {ids.dtype}")
    outside = token_ids[(token_ids < 0) | (token_ids > _LARGEST_ID)]  # the conversion to int32 would change them
    if len(outside):
        raise DataError(f"token id {outside[0]} is not in the vocabulary")
    wrong_labels = label_ids[(label_ids < 0) & (label_ids != CROSS_ENTROPY_IGNORE_IDX)]
    if len(wrong_labels):
        raise DataError(f"label {wrong_labels.min()} is neither a token id nor {CROSS_ENTROPY_IGNORE_IDX}")
    return token_ids.astype(np.int32, copy=False), label_ids.astype(np.int32, copy=False)


def _flat_array(values: Any) -> np.ndarray:
    """Return values as an array ``[s]``; raise :class:`DataError` for nested or ragged lists."""
    try:
        ids = np.asarray(values)
    except ValueError:  # ragged lists
        ids = np.empty((0, 0))
    if ids.ndim != 1:
        raise DataError("tokens and labels must be flat lists of token ids")
    return ids


def too_long(longest: int, *, is_prompt: bool = False) -> str:
    """Return the reason why a row cannot be trained on that has more tokens than the model reads."""
    reason = f"it has more tokens than the {longest:,} that the model reads (its max_seq_len): shorten it"
    if is_prompt:  # prompts are never truncated
        return reason
    return f"{reason}, or truncate rows with tokenizer.max_seq_len={longest}"


class RowTokenizer:
    """Tokenizer of consecutive rows, which collects the reasons why some cannot be trained on.

    Args:
        transform: row -> a sample, or a list of samples: mappings with ``tokens``, ``labels`` and optionally
            ``label_weights``.
        tokenizer: the tokenizer that ``transform`` calls; its ``take_omitted``, if any, says what it leaves out of a
            row.
        limit: maximum row length in tokens that ``transform`` truncates to, for messages.
        side: side that ``transform`` truncates, ``"right"`` or ``"left"``, for messages.
        has_notes: whether samples may have a ``note`` (plain data), which is stored with the tokens.
        needs_labels: whether a sample without labels is left out, and a row without any other sample is refused.
        answers: names of the texts of a sample, which is a mapping from these names to texts with ``tokens`` and so on;
            each name is that of a store. By default, a sample is one text, of the store ``rows``.

    Attributes:
        longest: maximum number of tokens of a row; None for no limit.
    """

    def __init__(
        self,
        transform: Callable[[Mapping[str, Any]], Any],
        *,
        tokenizer: Any = None,
        limit: int | None = None,
        side: str = "right",
        has_notes: bool = False,
        needs_labels: bool = True,
        answers: Sequence[str] = (),
    ) -> None:
        self._transform = transform
        self._take_omitted: Callable[[], list[str]] = getattr(tokenizer, "take_omitted", list)
        self._limit = limit
        self._reason = "the prompt is too long"
        if side != "right":
            self._reason = "what is trained on comes before the cut"
        self._outputs = {"tokens", "labels", "label_weights"}
        if has_notes:
            self._outputs.add("note")
        self._needs_labels = needs_labels
        self._answers = answers
        self.longest: int | None = None

    def tokenize_part(
        self, start: int, rows: Iterable[Any], location: Callable[[int], str] = "row {}".format
    ) -> tuple[pa.RecordBatch, dict[str, Any]] | None:
        """Tokenize the rows from number ``start`` on; ``location`` names a row for the watchdog.

        Returns:
            The token rows, and facts about the rows (see :class:`PreparedRows`); None if a sample has
            outputs besides tokens, such as images: such a dataset transforms its rows when they are read.
        """
        columns: dict[str, list[np.ndarray]] = {}
        for name in self._answers or ("rows",):
            columns |= {f"{name}.tokens": [], f"{name}.labels": [], f"{name}.label_weights": []}
        facts: dict[str, Any] = {"rows": 0, "numbers": [], "bad": [], "notes": [], "omitted": {}}
        for index, row in enumerate(decoded_rows(rows), start):
            sign_of_life(location(index))
            facts["rows"] += 1
            if isinstance(row, DataError):
                facts["bad"].append((index, str(row)))
                continue
            self._take_omitted()  # forget what it left out of other texts, such as a preview of the layout
            try:
                samples = self._transform(row)
                if not isinstance(samples, list):
                    samples = [samples]
                if self._has_other_outputs(samples, row):
                    return None
                if self._needs_labels:
                    samples = self._with_labels(samples)
                # All of them, before any is added: a row is trained on as a whole, or not at all.
                token_rows = [self._checked(self._texts(sample)) for sample in samples]
            except DataError as error:
                facts["bad"].append((index, str(error)))
                continue
            except RecursionError:
                facts["bad"].append((index, "it is nested too deeply"))
                continue
            for kind in self._take_omitted():
                facts["omitted"].setdefault(kind, []).append(index)
            for sample, token_row in zip(samples, token_rows, strict=True):
                facts["numbers"].append(index)
                for text in self._texts(sample):
                    if "note" in self._outputs and "note" in text:
                        facts["notes"].append(text["note"])
                # The columns stand in the order of the arrays of a token row.
                for column, values in zip(columns.values(), token_row, strict=True):
                    column.append(values)
        sign_of_life()
        return make_batch(columns), facts

    def _has_other_outputs(self, samples: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> bool:
        """Return whether a sample has outputs that are neither stored nor columns of the row, such as images.

        Such rows are transformed when they are read.
        """
        if self._answers:
            return False
        return any(sample.keys() - {*self._outputs, *row} for sample in samples)

    def _with_labels(self, samples: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return the samples that have a label; raise :class:`DataError` if there are none."""
        labeled = [sample for sample in samples if has_label(sample)]
        if not labeled:
            raise DataError(NO_LABEL + why_no_label(samples[0], self._limit, self._reason))
        return labeled

    def _texts(self, sample: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return the texts of a sample, one for each store."""
        if not self._answers:
            return [sample]
        return [sample[name] for name in self._answers]

    def _checked(self, texts: Sequence[Mapping[str, Any]]) -> list[np.ndarray]:
        """Return tokens, labels and label weights of each text ``[s]``; raise :class:`DataError` for invalid ones."""
        token_row: list[np.ndarray] = []
        for text in texts:
            tokens, labels = check_row(text["tokens"], text["labels"])
            label_weights = check_label_weights(text.get("label_weights"), labels)
            token_row += [tokens, labels, label_weights]
        if self.longest is not None and any(len(values) > self.longest for values in token_row):
            raise DataError(too_long(self.longest))
        return token_row


def prepare_rows(
    source: RowSource,
    row_tokenizer: RowTokenizer,
    depends_on: Mapping[str, Any],
    *,
    encoded_images: bool = False,
    skip_setting: str = "on_bad_row=skip",
    formats: Collection[str] = (),
    is_exact: bool = True,
) -> PreparedRows | None:
    """Return the token rows of a source: from the cache or, if they are not there, tokenized now.

    Args:
        source: the source.
        row_tokenizer: tokenizes the rows.
        depends_on: name -> value of everything that determines the token rows, except the source.
        encoded_images: whether the transform opens the images of a table itself, see :meth:`RowSource.rows`.
        skip_setting: the setting that skips rows that cannot be trained on, for messages.
        formats: formats of rows that the dataset reads, for messages; empty if it may read any.
        is_exact: whether ``depends_on`` is complete, so that other runs can reuse the token rows.

    Returns:
        None if a row has more than tokens.

    Raises:
        DataError: some rows cannot be trained on and are not skipped; the message names up to ten.
        ShardWritten: a shard was prepared (:func:`preparing_shard`).
    """
    shard = current_shard()  # None in a run: set while `tune data prepare --shard` prepares a part of the rows
    fingerprint = source.fingerprint(depends_on)
    fingerprint.is_exact = fingerprint.is_exact and is_exact
    with cache_entry(fingerprint, source.name, source.prepared) as entry:
        if entry.writer is not None:  # the cache does not have the rows yet
            rows = source.rows(encoded_images=encoded_images)
            bad = BadRows(source.name, rows, skips=source.skips, skip_setting=skip_setting, formats=formats)
            numbers = range(len(rows))
            if shard is not None:
                numbers = shard.rows(len(rows))
            entry.is_stored = _write_rows(rows, numbers, row_tokenizer, bad, entry.writer)
    token_rows = entry.rows
    # The dataset of rows with images says why they cannot be prepared.
    if shard is not None and token_rows is not None and not token_rows.notes:
        raise ShardWritten(record_of(source.name, fingerprint, token_rows))
    return token_rows


def _write_rows(rows: Any, numbers: range, row_tokenizer: RowTokenizer, bad: BadRows, writer: RowWriter) -> bool:
    """Write the tokens of consecutive rows, with a progress bar; many rows are tokenized in several processes.

    Rows that a killed process has written are not tokenized again.

    Args:
        rows: all rows of the source.
        numbers: the rows to write; without any, a batch without rows is written.
        row_tokenizer: tokenizes them.
        bad: collects the rows that cannot be trained on.
        writer: writes them.

    Returns:
        Whether the rows were written; False if one has more than tokens.

    Raises:
        DataError: some rows cannot be trained on and are not skipped.
    """
    done = writer.before.total
    for index, reason in writer.before.bad:
        bad.add(index, reason)
    if done:
        message = f"Going on behind {done:,} rows that were tokenized before."
        log_rank_zero(get_logger(), message, logging.WARNING)  # commands only show warnings and errors
    hidden = None  # show the bar only on a terminal
    if os.environ.get("GROUP_RANK", "0") != "0":  # another machine shows it
        hidden = True
    if not numbers and not writer.sums:  # no batch yet: a shard without rows has one, too
        writer.write(*row_tokenizer.tokenize_part(numbers.start, []))
    with tqdm(total=len(numbers), initial=done, desc="Tokenizing", unit=" rows", disable=hidden) as bar:
        for tokenized in in_parts(rows, row_tokenizer.tokenize_part, numbers.start + done, numbers.stop):
            if tokenized is None:
                return False
            batch, facts = tokenized
            sign_of_life()
            for index, reason in facts["bad"]:
                bad.add(index, reason)
            writer.write(batch, facts)
            bar.update(facts["rows"])
    bad.check()  # `add` has raised only for as many rows as a message names
    return True


class TokenizedDataset(ExampleDataset):
    """Base class of datasets whose rows are tokenized at construction, or mapped from an earlier run.

    Args:
        source: the source of the rows.
        rows: the token rows; None if rows are transformed when they are read.
        names: names of the stores.
        limit: maximum row length in tokens that the tokenizer truncates to, to report truncated rows.
        skip_setting: the setting that skips rows that cannot be trained on, for messages.
        are_prompts: whether rows are prompts, which are never truncated.
        are_divided: whether packs divide long rows, so that they need not fit the model.
        are_only_tokens: whether rows are tokens and labels alone, so that rows with equal ones are duplicates.

    Attributes:
        source: name of the source.
        stores: name -> token rows.

    Raises:
        DataError: no row is left that can be trained on.
    """

    def __init__(
        self,
        source: RowSource,
        rows: PreparedRows | None,
        *,
        names: Sequence[str] = ("rows",),
        limit: int | None = None,
        skip_setting: str = "on_bad_row=skip",
        are_prompts: bool = False,
        are_divided: bool = False,
        are_only_tokens: bool = False,
    ) -> None:
        if source.drops_duplicates and not are_only_tokens:
            raise DataError(
                "drop_duplicates compares tokens and labels, and these rows are told apart by more: leave it out."
            )
        self._row_source = source
        self.source = source.name
        self.stores: dict[str, TokenStore] = {}
        self._limit = limit
        self._skip_setting = skip_setting
        self._are_prompts = are_prompts
        self._are_divided = are_divided
        if rows is None:  # the subclass sets the numbers of its rows
            return
        self.stores = {name: rows.store(name) for name in names}
        self._numbers = rows.numbers
        self._total = rows.total
        self.dropped = [row for row, _ in rows.bad]
        # Before duplicates are dropped: the report compares the rows that can be trained on with those of the source.
        report_left_out(rows.bad, self.source, rows.total, len(self))
        self._drop_duplicates()
        if rows.omitted:
            kinds = [f"the {kind} of {count:,}" for kind, count in sorted(rows.omitted.items())]
            self.omitted = f"the chat template drops {', '.join(kinds)} of {rows.total:,} rows"
            log_rank_zero(get_logger(), f"{self.source}: {self.omitted}: it is not trained on.", logging.WARNING)
        if self.num_truncated:
            message = (
                f"{self.num_truncated} of {len(self)} rows of {self.source} are as long as max_seq_len={limit} or "
                "were cut to it."
            )
            log_rank_zero(get_logger(), message, logging.WARNING)

    def _drop_duplicates(self) -> None:
        """Drop rows that equal an earlier row, if the source asks for it."""
        if not self._row_source.drops_duplicates:
            return
        duplicates = self.store.duplicates()
        if len(duplicates):
            self._keep(np.delete(np.arange(len(self)), duplicates))
            log_rank_zero(
                get_logger(), f"{self.source}: {len(duplicates):,} rows that repeat an earlier row are dropped."
            )

    @property
    def num_truncated(self) -> int:
        """Number of rows that have as many tokens as the tokenizer's ``max_seq_len``, or were cut to it."""
        if self._limit is None or not self.stores:
            return 0
        return int((self._text_lengths() >= self._limit).sum())

    def _text_lengths(self) -> np.ndarray:
        """Return the number of tokens of the longest text of each row, int64 ``[rows]``."""
        return np.max([store.lengths for store in self.stores.values()], axis=0)

    def limit_rows(self, longest: int) -> None:
        """See :meth:`torchtune.data.ExampleDataset.limit_rows`; the cached rows do not depend on the model."""
        if self._are_divided or not self.stores:  # packs cut rows, and rows without a store are checked when read
            return
        is_long = self._text_lengths() > longest
        if not is_long.any():
            return
        reason = too_long(longest, is_prompt=self._are_prompts)
        # A row of the source may be several samples: those that fit are kept.
        long_rows = [(row, reason) for row in np.unique(self._numbers[is_long]).tolist()]
        if not self._row_source.skips:  # raises: what follows is for rows that are skipped
            bad = BadRows(self.source, self._row_source.rows(), skips=False, skip_setting=self._skip_setting)
            for row, reason in long_rows:
                bad.add(row, reason)
            bad.check()
        self._keep(np.flatnonzero(~is_long))
        self.dropped = sorted({*self.dropped, *(row for row, _ in long_rows)})
        report_left_out(long_rows, self.source, self._total, len(self))

    def _keep(self, rows: np.ndarray) -> None:
        """Keep some token rows, int64 ``[kept]``, and leave out the others."""
        self.stores = {name: store.select(rows) for name, store in self.stores.items()}
        self._numbers = self._numbers[rows]

    @property
    def store(self) -> TokenStore | None:
        """The token rows; ``None`` if there are several stores, or none."""
        return self.stores.get("rows")

    @property
    def known_lengths(self) -> np.ndarray | None:
        """Number of tokens of each row, int64 ``[rows]``; None if rows are tokenized when they are read."""
        if not self.stores:
            return None
        return sum(store.lengths for store in self.stores.values())

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each row, int64 ``[rows]``; reads rows that are tokenized when they are read."""
        return self.measure()

    @property
    def longest(self) -> int | None:
        """See :class:`torchtune.data.ExampleDataset`; answers of a pair are read separately."""
        if not self.stores:
            return None
        return int(self._text_lengths().max(initial=0))

    @property
    def fingerprint(self) -> int | tuple[int, ...] | None:
        """Digest of all tokens and labels; None if rows are tokenized when they are read."""
        if not self.stores:
            return None
        return self.store.fingerprint

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return ``tokens`` and pre-shifted ``labels``."""
        return self.store.lists(index)

    def token_row(self, index: int) -> Any:
        """See :class:`torchtune.data.ExampleDataset`."""
        if self.store is None:
            return self[index]
        return self.store[index]

    def first_conversations(self, count: int) -> list[tuple[int, Mapping[str, Any], Conversation]] | None:
        """See :class:`torchtune.data.ExampleDataset`."""
        rows = self._row_source.rows()
        conversations = []
        numbers = list(dict.fromkeys(self._right_rows.tolist()))  # the tokenizer may split a row into several examples
        for number in numbers[:count]:
            conversation = self._conversation_of(rows[number])
            if conversation is None:
                return None
            conversations.append((number, rows[number], conversation))
        return conversations

    @property
    def _right_rows(self) -> np.ndarray:
        """Numbers of the rows with a right answer, int64 ``[rows]``."""
        return self._numbers

    def _conversation_of(self, row: Mapping[str, Any]) -> Conversation | None:
        """Return the conversation of a row, which ends with the right answer; None if rows are not conversations."""
        return None

    def origins(self, index: int) -> list[dict[str, Any]]:
        """Return ``source`` and ``row`` (counted from 0, after ``filter_fn``) of an example."""
        return [{"source": self.source, "row": int(self._numbers[index])}]
