"""Datasets from outside this library: their examples are checked when they are read."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, DataError, WrappedDataset, check_shifted
from torchtune.datasets._tokenized import check_label_weights, check_row

# Maximum number of examples that are searched for a label.
_NUM_SEARCHED = 32


class CheckedDataset(WrappedDataset):
    """Wrapper of a dataset from outside this library that checks examples when they are read.

    Args:
        dataset: map-style dataset of examples (mappings with ``tokens`` and pre-shifted ``labels``) or packs (lists of
            examples).
        vocab_size: upper bound of token ids (exclusive); ``None`` if unknown.

    Raises:
        DataError: the dataset is empty or not map-style, an example has another format, or the first examples have no
            labels or unshifted labels.
    """

    def __init__(self, dataset: Any, vocab_size: int | None) -> None:
        super().__init__(dataset)
        self.name = type(dataset).__name__
        self._vocab_size = vocab_size
        self._longest: int | None = None
        missing = [method for method in ("__len__", "__getitem__") if not hasattr(dataset, method)]
        if missing:
            raise DataError(
                f"dataset: {self.name} has no {' and no '.join(missing)}: a dataset gives examples by index and has a "
                "length, so that a run can be resumed."
            )
        self._length = len(dataset)
        if self._length == 0:
            raise DataError(f"dataset: {self.name} is empty: there is nothing to train on.")
        self._check_labels()

    def limit_rows(self, longest: int) -> None:
        """See :meth:`torchtune.data.ExampleDataset.limit_rows`; later examples are checked when they are read."""
        self._longest = longest
        self[0]

    def __getitem__(self, index: int) -> Any:
        """Return an example; raise :class:`DataError` if it has another format."""
        try:
            example = self.dataset[index]
        except IndexError as error:
            if index >= self._length or len(self.dataset) == self._length:
                raise
            raise DataError(
                f"dataset: example {index} of {self.name} is gone: it had {self._length:,} examples at the start and "
                f"has {len(self.dataset):,} now. Resume with all of them."
            ) from error
        try:
            for document in _documents_of(example):
                self._check(document)
        except DataError as error:
            raise DataError(f"dataset: example {index} of {self.name}: {error}.") from error
        return example

    def _check_labels(self) -> None:
        """Raise if the first examples have no labels, or every label is the token at its own position."""
        tokens: list[torch.Tensor] = []
        labels: list[torch.Tensor] = []
        num_searched = min(self._length, _NUM_SEARCHED)
        for index in range(num_searched):
            for document in _documents_of(self[index]):
                tokens.append(torch.as_tensor(document["tokens"], dtype=torch.int64))
                labels.append(torch.as_tensor(document["labels"], dtype=torch.int64))
                is_labeled = labels[-1] != CROSS_ENTROPY_IGNORE_IDX
                is_other_token = labels[-1] != tokens[-1]
                # Prompts of the rollout recipes have a number and placeholder labels.
                if "number" in document or (is_labeled & is_other_token).any():
                    return
        if (torch.cat(labels) == CROSS_ENTROPY_IGNORE_IDX).all():
            raise DataError(
                f"dataset: {self.name} has no label in its first {num_searched:,} examples: labels[i] is the token to "
                f"predict at position i, and {CROSS_ENTROPY_IGNORE_IDX} where none is."
            )
        check_shifted(torch.cat(tokens), torch.cat(labels), [len(row) for row in tokens], self.name)

    def _check(self, document: Any) -> None:
        if not isinstance(document, Mapping):
            raise DataError(f"it is {type(document).__name__}, not a mapping with 'tokens' and 'labels'")
        for key in ("tokens", "labels"):
            if key not in document:
                raise DataError(f"it has no '{key}' among {', '.join(map(repr, document)) or 'nothing'}")
        tokens, labels = check_row(document["tokens"], document["labels"])
        check_label_weights(document.get("label_weights"), labels)
        if len(tokens) == 0:
            raise DataError("it has no tokens")
        if self._longest is not None and len(tokens) > self._longest:
            raise DataError(f"it has {len(tokens):,} tokens and the model reads {self._longest:,} (its max_seq_len)")
        for name, ids in (("token id", tokens), ("label", labels[labels != CROSS_ENTROPY_IGNORE_IDX])):
            if self._vocab_size is not None and len(ids) and ids.max() >= self._vocab_size:
                raise DataError(f"{name} {np.max(ids)} is not below {self._vocab_size}, the tokenizer's vocabulary")


def _documents_of(example: Any) -> list[Any]:
    return example if isinstance(example, list) and example else [example]
