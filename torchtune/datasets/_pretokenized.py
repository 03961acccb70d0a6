"""Rows that are already token ids, as other libraries prepare them."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, DataError, check_column_map, column
from torchtune.datasets._packed import PackedDataset, pack_length
from torchtune.datasets._row_formats import TOKEN_IDS
from torchtune.datasets._row_source import RowSource, Source
from torchtune.datasets._streamed import StreamedDataset
from torchtune.datasets._tokenized import (
    Tokenize,
    TokenizedDataset,
    check_label_weights,
    check_row,
    prepare_rows,
)
from torchtune.tokenizers import BaseTokenizer

# Columns of masks over the tokens of a row, 1 where a token is trained on, as TRL names them.
_MASK_COLUMNS = ("completion_mask", "assistant_masks")


class TokenIdsTransform:
    """Converts a row of token ids to tokens and pre-shifted labels; see :class:`PretokenizedDataset`."""

    def __init__(
        self, tokenizer: Any, column_map: Mapping[str, str] | None, max_seq_len: int | None, cut: bool
    ) -> None:
        defaults = {"input_ids": "input_ids", "labels": "labels", "weights": "weights"}
        self.column_map = {**defaults, **check_column_map(column_map, defaults, ())}
        self._chosen = frozenset(column_map or {})
        self._vocab_size = getattr(tokenizer, "vocab_size", None)
        self.limit = None
        if cut:
            self.limit = max_seq_len or getattr(tokenizer, "max_seq_len", None)

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``tokens``, pre-shifted ``labels`` and, if the row has weights, ``label_weights``.

        Raises:
            DataError: the row has no token ids, or its columns do not fit each other.
        """
        ids = column(row, self.column_map["input_ids"])
        if ids is None:
            raise DataError(f"column '{self.column_map['input_ids']}' holds nothing, not a list of token ids")
        tokens, labels = check_row(ids, self._labels(row, ids))
        if self._vocab_size is not None and len(tokens) and tokens.max() >= self._vocab_size:
            raise DataError(f"token id {tokens.max()} is not below {self._vocab_size}, the tokenizer's vocabulary")
        attention_mask = row.get("attention_mask")
        if attention_mask is not None and (len(attention_mask) != len(tokens) or not all(attention_mask)):
            raise DataError("column 'attention_mask' has zeros, which mark padding: write the rows without padding")
        labels = _shifted(labels, CROSS_ENTROPY_IGNORE_IDX)  # nothing follows the last token
        sample = {"tokens": tokens[: self.limit], "labels": labels[: self.limit]}
        if self.limit is not None and len(tokens) > self.limit:
            # The label of a token that was cut off: a truncated row is trained on as if it ended there.
            sample["labels"][-1] = CROSS_ENTROPY_IGNORE_IDX
        weights = self._optional(row, "weights")
        if weights is not None:
            weights = check_label_weights(weights, tokens)
            sample["label_weights"] = _shifted(weights, 1.0)[: self.limit]  # 1.0: that position has no label
        return sample

    def _optional(self, row: Mapping[str, Any], name: str) -> Any:
        """Return a column that a row need not have, unless the user has named it."""
        source = self.column_map[name]
        if name in self._chosen:
            return column(row, source)
        return row.get(source)

    def _labels(self, row: Mapping[str, Any], ids: Any) -> Any:
        """Return the label of each token, at its own position; without labels or a mask, all tokens are trained on."""
        labels = self._optional(row, "labels")
        if labels is not None:
            return labels
        for name in _MASK_COLUMNS:
            mask = row.get(name)
            if mask is None:
                continue
            if len(mask) != len(ids) or not all(value in (0, 1) for value in mask):
                raise DataError(f"column '{name}' must have a 0 or a 1 for each of the {len(ids)} tokens")
            return np.where(np.asarray(mask, bool), np.asarray(ids), CROSS_ENTROPY_IGNORE_IDX)
        return ids


def _shifted(values: np.ndarray, last: float) -> np.ndarray:
    """Return ``values`` [s] one position earlier: at position i the value of token i + 1, and ``last`` at the end."""
    return np.append(values[1:], np.asarray(last, values.dtype))


class PretokenizedDataset(TokenizedDataset):
    """Dataset of rows of token ids.

    ``labels`` are those of the tokens at their own position (-100: not trained on), as in ``transformers``, and are
    shifted here. Without them, a column ``completion_mask`` or ``assistant_masks`` (1: trained on) decides; without
    these, all tokens are trained on. ``weights`` are factors of the tokens in the loss.

    Args:
        tokenizer: tokenizer of the model, which says how many tokens there are, and ``max_seq_len``.
        source: Hub dataset, folder, file, loader name, or rows in memory.
        column_map: maps ``input_ids``, ``labels`` and ``weights`` to columns.
        filter_fn: function of a row; rows for which it returns False are dropped.
        max_seq_len: rows are truncated to it; by default the tokenizer's.
        cut: whether to truncate rows.
        **load_dataset_kwargs: passed to ``datasets.load_dataset``.

    Raises:
        DataError: the data cannot be loaded, has no rows, or has rows that cannot be trained on (listed by number).

    Example:
        >>> rows = [{"input_ids": [5, 40, 7], "labels": [-100, 40, 7]}]
        >>> torchtune.datasets.PretokenizedDataset(tokenizer, rows)[0]
        {'tokens': [5, 40, 7], 'labels': [40, 7, -100]}
    """

    def __init__(
        self,
        tokenizer: BaseTokenizer,
        source: Source,
        column_map: Mapping[str, str] | None = None,
        filter_fn: Callable[..., bool] | None = None,
        max_seq_len: int | None = None,
        cut: bool = True,
        **load_dataset_kwargs: Any,
    ) -> None:
        transform = TokenIdsTransform(tokenizer, column_map, max_seq_len, cut)
        row_source = RowSource(source, filter_fn=filter_fn, **load_dataset_kwargs)
        rows = prepare_rows(
            row_source,
            Tokenize(transform, limit=transform.limit),
            {
                "dataset": type(self),
                "tokenizer": tokenizer,
                "columns": transform.column_map,
                "limit": transform.limit,
            },
            formats=(TOKEN_IDS,),
        )
        super().__init__(row_source, rows, limit=transform.limit, are_divided=not cut, are_only_tokens=True)


def pretokenized_dataset(
    tokenizer: BaseTokenizer,
    source: Source,
    column_map: Mapping[str, str] | None = None,
    packed: bool = False,
    split_across_pack: bool = False,
    split: str = "train",
    filter_fn: Callable[..., bool] | None = None,
    max_seq_len: int | None = None,
    **load_dataset_kwargs: Any,
) -> PretokenizedDataset | PackedDataset | StreamedDataset:
    """Build a dataset of rows of token ids; see :class:`PretokenizedDataset`.

    Args:
        tokenizer: tokenizer of the model.
        source: Hub dataset, folder, file, loader name (``json``, ``parquet`` …), or rows in memory.
        column_map: maps ``input_ids``, ``labels`` and ``weights`` to columns.
        packed: pack rows.
        split_across_pack: fill packs completely; rows are split at the ends of packs and never truncated.
        split: split of the dataset.
        filter_fn: function of a row; rows for which it returns False are dropped.
        max_seq_len: maximum row or pack length in tokens; by default the tokenizer's.
        **load_dataset_kwargs: passed to ``datasets.load_dataset``, for example ``data_files``.

    Raises:
        DataError: ``packed`` is True but there is no ``max_seq_len``; further cases in :class:`PretokenizedDataset`.

    Example:
        >>> data = torchtune.datasets.pretokenized_dataset(tokenizer, source=[{"input_ids": [5, 40, 7]}])
        >>> data[0]["labels"]
        [40, 7, -100]
    """
    # The ending is that of text_completion_dataset, written out: `tune validate` follows **load_dataset_kwargs to the
    # classes that are called here, which it could not do through a function that is given the class.
    length = None
    if packed:  # fails before the rows are read
        length = max_seq_len or pack_length(tokenizer)
    cut = not (packed and split_across_pack)
    if load_dataset_kwargs.get("streaming"):
        transform = TokenIdsTransform(tokenizer, column_map, max_seq_len, cut)
        return StreamedDataset(
            transform,
            source,
            limit=transform.limit,
            pack_length=length,
            split_across_pack=split_across_pack,
            filter_fn=filter_fn,
            split=split,
            **load_dataset_kwargs,
        )
    dataset = PretokenizedDataset(
        tokenizer=tokenizer,
        source=source,
        column_map=column_map,
        filter_fn=filter_fn,
        max_seq_len=max_seq_len,
        cut=cut,
        split=split,
        **load_dataset_kwargs,
    )
    if length is None:
        return dataset
    return PackedDataset(dataset, max_seq_len=length, split_across_pack=split_across_pack)
