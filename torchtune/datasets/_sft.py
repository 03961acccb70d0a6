"""Supervised fine-tuning: rows -> messages -> tokens and labels."""

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from tqdm import tqdm

from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, DataError, Transform, as_messages, validate_messages
from torchtune.data._common import as_sample
from torchtune.datasets._bad_rows import BadRows, say_what_is_left_out
from torchtune.datasets._fingerprint import Fingerprint
from torchtune.datasets._load import RowSource, Source
from torchtune.datasets._parallel import in_parts
from torchtune.datasets._shared import prepare
from torchtune.datasets._store import StoreWriter, TokenStore, check_row, shifted_labels
from torchtune.utils import get_logger, log_rank_zero, sign_of_life

NO_LABEL = "no label is left"


class SFTTransform(Transform):
    """A row to tokens and pre-shifted labels.

    Args:
        message_transform: row -> ``messages``; ``None`` where rows have them.
        model_transform: ``messages`` -> ``tokens`` and ``mask``, usually a tokenizer.

    Example:
        >>> transform = torchtune.datasets.SFTTransform(torchtune.data.OpenAIToMessages(), tokenizer)
        >>> turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "one"}]
        >>> row = transform({"messages": turns})
        >>> len(row["tokens"]) == len(row["labels"])
        True
    """

    def __init__(self, message_transform: Transform | None = None, model_transform: Transform | None = None) -> None:
        self.message_transform = message_transform
        self.model_transform = model_transform

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """``tokens``, ``labels`` and what else the transforms give.

        Raises:
            DataError: the row does not fit the transforms.
        """
        if self.message_transform is not None:
            sample = as_sample(self.message_transform(sample), "message_transform")
            if "messages" in sample:
                sample["messages"] = as_messages(sample["messages"])
                validate_messages(sample["messages"])
        if self.model_transform is not None:
            sample = self.model_transform(sample)
        sample = as_sample(sample, "the model transform")
        if "tokens" not in sample or "mask" not in sample:
            raise DataError(
                f"the model transform gives {', '.join(map(str, sample)) or 'nothing'}, but 'tokens' and 'mask' are "
                "needed"
            )
        sample["labels"] = shifted_labels(sample["tokens"], sample.pop("mask"))
        return sample


@dataclass
class _Part:
    """Transformed rows.

    Args:
        tokens: int32 [all tokens].
        labels: int32 [all tokens].
        lengths: int64 [rows].
        cut: rows that are as long as may be.
        bad: rows that cannot be trained on, and why.
        on_reading: the first row has more than tokens: rows are to be transformed when they are read.
    """

    tokens: np.ndarray
    labels: np.ndarray
    lengths: np.ndarray
    cut: int = 0
    bad: list[tuple[int, str]] = field(default_factory=list)
    on_reading: bool = False


class _Tokenize:
    """Transforms a part of the rows; see :func:`tokenize_rows`."""

    def __init__(
        self, transform: Callable[[Mapping[str, Any]], Mapping[str, Any]], limit: int | None, side: str
    ) -> None:
        self._transform, self._limit, self._side = transform, limit, side

    def __call__(self, start: int, rows: Iterable[Any]) -> _Part:
        tokens, labels = [np.empty(0, np.int32)], [np.empty(0, np.int32)]
        part = _Part(*tokens, *labels, np.empty(0, np.int64))
        for index, row in enumerate(rows, start):
            sign_of_life()
            try:
                if not isinstance(row, Mapping):
                    raise DataError(f"a row must be a mapping column -> value, not {type(row).__name__}")
                sample = self._transform(row)
                if index == 0 and sample.keys() - {"tokens", "labels", *row}:
                    part.on_reading = True
                    return part
                ids, targets = check_row(sample["tokens"], sample["labels"])
                is_full = self._limit is not None and len(ids) >= self._limit
                part.cut += is_full
                if not (targets != CROSS_ENTROPY_IGNORE_IDX).any():
                    why = (
                        "the prompt is too long" if self._side == "right" else "what is trained on comes before the cut"
                    )
                    raise DataError(NO_LABEL + (f" within max_seq_len={self._limit}, {why}" if is_full else ""))
            except DataError as error:
                part.bad.append((index, str(error)))
                continue
            tokens.append(ids)
            labels.append(targets)
        part.tokens, part.labels = np.concatenate(tokens), np.concatenate(labels)
        part.lengths = np.array([len(ids) for ids in tokens[1:]], np.int64)
        return part


def tokenize_rows(
    rows: Any,
    transform: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    source: str,
    writer: StoreWriter,
    limit: int | None,
    side: str = "right",
    skips: bool = False,
) -> dict[str, Any]:
    """Transform every row, with a progress bar; many rows in several processes.

    Args:
        rows: mappings column -> value.
        transform: a row -> ``tokens`` and ``labels``.
        source: what the rows are from.
        writer: takes the transformed rows.
        limit: longest row; ``side`` is the end of longer ones that is cut.
        side: see ``limit``.
        skips: leave out rows that cannot be trained on.

    Returns:
        ``cut``: how many rows are as long as ``limit``; ``skipped``: (row, reason) of those that are left out; or
        ``on_reading`` where the first row has more than tokens.

    Raises:
        DataError: some rows cannot be transformed or have no label; the message names up to ten.
    """
    bad, cut = BadRows(source, drop=skips, switch="on_bad_row=skip"), 0
    hidden = True if os.environ.get("GROUP_RANK", "0") != "0" else None  # None: only on a terminal
    with tqdm(total=len(rows), desc="Tokenizing", unit=" rows", disable=hidden) as bar:
        for part in in_parts(rows, _Tokenize(transform, limit, side)):
            sign_of_life()
            if part.on_reading:
                return {"on_reading": True}
            for index, reason in part.bad:
                bad.add(index, reason)
            writer.extend(part.tokens, part.labels, part.lengths)
            cut += part.cut
            bar.update(len(part.lengths) + len(part.bad))
    bad.check()
    return {"cut": cut, "skipped": bad.left_out}


def row_numbers(info: Mapping[str, Any], rows: int, source: str) -> np.ndarray:
    """int64 [rows]: the number of each row in its source; says which are left out."""
    skipped = info.get("skipped", [])
    say_what_is_left_out(skipped, source, rows + len(skipped))
    return np.delete(np.arange(rows + len(skipped)), [row for row, _ in skipped])


def say_what_is_cut(info: Mapping[str, Any], rows: int, source: str, limit: int | None) -> None:
    """Warn of rows that may have been cut, whether they were prepared now or before."""
    if info.get("cut"):
        log_rank_zero(
            get_logger(),
            f"{info['cut']} of {rows} rows of {source} are as long as max_seq_len={limit} or were cut to it.",
            logging.WARNING,
        )


class SFTDataset(Dataset):
    """Rows for supervised fine-tuning, tokenized when the dataset is made.

    One process of a machine tokenizes, all of them map its files. They are used again by later runs with the same
    data, tokenizer and settings; transforms and filters that are not of this library take part where they have an
    attribute ``fingerprint``, a text that changes when they do.

    Everything that is wrong with the data shows before training starts. Transforms that give more than tokens
    (images) are applied again whenever such a row is read, and only the first row is checked.

    ``on_bad_row=skip`` leaves out rows that cannot be trained on, and lists them in the run's ``skipped_rows.jsonl``.

    Args:
        source: a dataset of the hub, a folder, a file, a loader's name (``json``, ``csv``, ``parquet`` …), or rows in
            memory: a ``datasets.Dataset`` or an iterable of mappings.
        message_transform: row -> ``messages``.
        model_transform: ``messages`` -> ``tokens`` and ``mask``, usually a tokenizer.
        filter_fn: rows for which it is false are left out.
        filter_kwargs: arguments of ``datasets.Dataset.filter``.
        **load_dataset_kwargs: arguments of ``datasets.load_dataset``; ``prepared``: a folder of ``tune data prepare``.

    Raises:
        DataError: the data cannot be loaded, has no rows, or has rows that cannot be trained on (named by number); the
            rows in ``prepared`` are others.

    Example:
        >>> rows = [{"question": "Who?", "answer": "one cat"}]
        >>> transform = torchtune.data.InputOutputToMessages(column_map={"input": "question", "output": "answer"})
        >>> data = torchtune.datasets.SFTDataset(source=rows, message_transform=transform, model_transform=tokenizer)
        >>> tokenizer.decode([label for label in data[0]["labels"] if label != -100])
        'one cat'
    """

    def __init__(
        self,
        *,
        source: Source,
        message_transform: Transform,
        model_transform: Transform,
        filter_fn: Callable[..., bool] | None = None,
        filter_kwargs: Mapping[str, Any] | None = None,
        **load_dataset_kwargs: Any,
    ) -> None:
        self._transform = SFTTransform(message_transform, model_transform)
        found = RowSource(source, filter_fn=filter_fn, filter_kwargs=filter_kwargs, **load_dataset_kwargs)
        self.source = found.shown
        limit, side = (
            getattr(model_transform, "max_seq_len", None),
            getattr(model_transform, "truncation_type", "right"),
        )
        fingerprint = Fingerprint()
        fingerprint.add_part("dataset", type(self))
        fingerprint.add_part("masks and columns", message_transform)
        fingerprint.add_part("tokenizer", model_transform)
        found.add_to(fingerprint)

        def build(writers: Mapping[str, StoreWriter]) -> dict[str, Any]:
            return tokenize_rows(found.rows(), self._transform, self.source, writers["rows"], limit, side, found.skips)

        stores, info = prepare(fingerprint, ["rows"], self.source, build, found.prepared)
        on_reading = bool(info.get("on_reading"))
        self._rows = found.rows() if on_reading else None
        self.store: TokenStore | None = None if on_reading else stores["rows"]
        self._numbers = row_numbers(info, len(self), self.source)
        say_what_is_cut(info, len(self), self.source, limit)

    @property
    def lengths(self) -> np.ndarray:
        """int64 [rows]: tokens of every row."""
        if self.store is None:
            return np.array([len(self[index]["tokens"]) for index in range(len(self))])
        return self.store.lengths

    @property
    def fingerprint(self) -> int | None:
        """Changes when any token or label does; ``None`` where rows are transformed on reading."""
        return None if self.store is None else self.store.fingerprint

    def __len__(self) -> int:
        return len(self._rows if self.store is None else self.store)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """``tokens`` and pre-shifted ``labels`` as lists, and what else the transform gives."""
        if self.store is None:
            return self._transform(self._rows[index])
        tokens, labels = self.store.arrays(index)
        return {"tokens": tokens.tolist(), "labels": labels.tolist()}

    def origins(self, index: int) -> list[dict[str, Any]]:
        """``source`` and ``row`` (counted from 0, after ``filter_fn``) of an example."""
        return [{"source": self.source, "row": int(self._numbers[index])}]

    def document(self, index: int, start: int = 0, end: int | None = None) -> dict[str, torch.Tensor]:
        """int64 tensors of (a piece of) a row."""
        return document_of(self, index, start, end)


def document_of(dataset: Any, index: int, start: int = 0, end: int | None = None) -> dict[str, torch.Tensor]:
    """int64 tensors of (a piece of) a row of any dataset whose rows have ``tokens`` and ``labels``."""
    store = getattr(dataset, "store", None)
    if store is not None:
        return store.document(index, start, end)
    row = dataset[index]
    return {key: torch.as_tensor(row[key], dtype=torch.int64)[start:end] for key in ("tokens", "labels")}
