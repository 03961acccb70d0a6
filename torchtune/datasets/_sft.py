"""Supervised fine-tuning: rows -> messages -> tokens and labels."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from tqdm import tqdm

from torchtune.data import DataError, Transform, validate_messages
from torchtune.datasets._bad_rows import BadRows
from torchtune.datasets._load import load_rows
from torchtune.datasets._store import TokenStore, has_label, shifted_labels
from torchtune.utils import get_logger

NO_LABEL = "no label is left"


class SFTTransform(Transform):
    """A row to tokens and pre-shifted labels.

    Args:
        message_transform: row -> ``messages``; ``None`` where rows have them.
        model_transform: ``messages`` -> ``tokens`` and ``mask``, usually a tokenizer.
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
            sample = self.message_transform(sample)
        if self.message_transform is not None and "messages" in sample:
            validate_messages(sample["messages"])
        sample = dict(self.model_transform(sample)) if self.model_transform is not None else dict(sample)
        if "tokens" not in sample or "mask" not in sample:
            raise DataError(
                f"the model transform gives {', '.join(sample) or 'nothing'}, but 'tokens' and 'mask' are needed"
            )
        sample["labels"] = shifted_labels(sample["tokens"], sample.pop("mask"))
        return sample


def tokenize_rows(
    rows: Any, transform: Callable[[Mapping[str, Any]], Mapping[str, Any]], source: str, max_seq_len: int | None
) -> TokenStore:
    """Transform every row, with a progress bar.

    Raises:
        DataError: some rows cannot be transformed or have no label; the message names up to ten.
    """
    store, bad, cut = TokenStore(), BadRows(source), 0
    hidden = True if os.environ.get("RANK", "0") != "0" else None  # None: only on a terminal
    for index, row in enumerate(tqdm(rows, desc="Tokenizing", unit=" rows", disable=hidden)):
        try:
            sample = transform(row)
        except DataError as error:
            bad.add(index, str(error))
            continue
        is_full = max_seq_len is not None and len(sample["tokens"]) >= max_seq_len
        cut += is_full
        if not has_label(sample):
            where = f" within max_seq_len={max_seq_len}, the prompt is too long" if is_full else ""
            bad.add(index, NO_LABEL + where)
            continue
        store.append(sample["tokens"], sample["labels"])
    bad.check()
    store.finish()
    if cut:
        get_logger().warning(
            f"{cut} of {len(store)} rows of {source} are as long as max_seq_len={max_seq_len} or were cut to it."
        )
    return store


class SFTDataset(Dataset):
    """Rows for supervised fine-tuning, tokenized when the dataset is made.

    Everything that is wrong with the data shows before training starts. Transforms that give more than tokens
    (images) are applied again whenever such a row is read, and only the first row is checked.

    Args:
        source: a dataset of the hub, a folder, a file, or a loader's name (``json``, ``csv``, ``parquet`` …).
        message_transform: row -> ``messages``.
        model_transform: ``messages`` -> ``tokens`` and ``mask``, usually a tokenizer.
        filter_fn: rows for which it is false are left out.
        filter_kwargs: arguments of ``datasets.Dataset.filter``.
        **load_dataset_kwargs: arguments of ``datasets.load_dataset``.

    Raises:
        DataError: the data cannot be loaded, has no rows, or has rows that cannot be trained on (named by number).
    """

    def __init__(
        self,
        *,
        source: str,
        message_transform: Transform,
        model_transform: Transform,
        filter_fn: Callable[..., bool] | None = None,
        filter_kwargs: Mapping[str, Any] | None = None,
        **load_dataset_kwargs: Any,
    ) -> None:
        self._transform = SFTTransform(message_transform, model_transform)
        rows = load_rows(source, filter_fn=filter_fn, filter_kwargs=filter_kwargs, **load_dataset_kwargs)
        self.source = str(load_dataset_kwargs.get("data_files") or source)
        self._rows = rows if self._gives_more_than_tokens(rows) else None
        self.store: TokenStore | None = None
        if self._rows is None:
            max_seq_len = getattr(model_transform, "max_seq_len", None)
            self.store = tokenize_rows(rows, self._transform, self.source, max_seq_len)

    def _gives_more_than_tokens(self, rows: Any) -> bool:
        row = rows[0]
        try:
            sample = self._transform(row)
        except DataError:
            return False  # reported with its row number when all rows are tokenized
        return bool(sample.keys() - {"tokens", "labels", *row})

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
        return [{"source": self.source, "row": index}]

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
