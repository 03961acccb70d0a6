"""Running text: every token is trained on."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, truncate
from torchtune.data._common import check_tokenizer
from torchtune.data._to_messages import text_column
from torchtune.datasets._build import pack_length
from torchtune.datasets._fingerprint import Fingerprint
from torchtune.datasets._load import RowSource, Source
from torchtune.datasets._packed import PackedDataset
from torchtune.datasets._sft import row_numbers, say_what_is_cut, transform_rows
from torchtune.datasets._shared import prepare
from torchtune.datasets._store import Writers
from torchtune.datasets._stream import StreamedDataset
from torchtune.datasets._tokenize import TransformRows
from torchtune.modules.transforms.tokenizers import BaseTokenizer


class TextTransform:
    """A row of text to tokens and labels; see :class:`TextCompletionDataset`."""

    def __init__(self, tokenizer: Any, column: str, add_eos: bool, max_seq_len: int | None, cut: bool) -> None:
        check_tokenizer(tokenizer)
        # Control tokens that a document spells are text; tokenizers that never read them need no method for that.
        self._encode = getattr(tokenizer, "encode_text", tokenizer.encode)
        self._column, self._add_eos = column, add_eos
        length = (max_seq_len or getattr(tokenizer, "max_seq_len", None)) if cut else None
        self.limit = None if length is None else length - 1

    def __call__(self, row: Mapping[str, Any]) -> dict[str, list[int]]:
        """``tokens`` and pre-shifted ``labels``. Raises :class:`DataError` for a row without text."""
        tokens = self._encode(text=text_column(row, self._column), add_bos=True, add_eos=self._add_eos)
        if self.limit is not None:
            tokens = truncate(tokens, self.limit)
        return {"tokens": tokens, "labels": [*tokens[1:], CROSS_ENTROPY_IGNORE_IDX]}


class TextCompletionDataset(Dataset):
    """Rows of text, tokenized when the dataset is made.

    A text begins with the token of the beginning where the tokenizer puts it before texts, and ends with that of the
    end. A control token that it spells, such as ``<|im_end|>``, is plain text, unless the tokenizer was made with
    ``parse_special_tokens=True``.

    Args:
        tokenizer: has ``encode(text, add_bos, add_eos)``, or ``encode_text``, and ``max_seq_len``.
        source: a dataset of the hub, a folder, a file, a loader's name, or rows in memory.
        column: the column with the text.
        add_eos: end every text with the end-of-sequence token.
        filter_fn: rows for which it is false are left out.
        max_seq_len: texts are cut to one token less; by default the tokenizer's.
        cut: whether to cut at all.
        **load_dataset_kwargs: arguments of ``datasets.load_dataset``.

    Raises:
        DataError: the data cannot be loaded, has no rows, or has rows without text (named by number).

    Example:
        >>> data = torchtune.datasets.TextCompletionDataset(tokenizer, [{"text": "the cat"}])
        >>> tokenizer.decode(list(data[0]["tokens"]))
        'the cat'
    """

    def __init__(
        self,
        tokenizer: BaseTokenizer,
        source: Source,
        column: str = "text",
        add_eos: bool = True,
        filter_fn: Callable[..., bool] | None = None,
        max_seq_len: int | None = None,
        cut: bool = True,
        **load_dataset_kwargs: Any,
    ) -> None:
        transform = TextTransform(tokenizer, column, add_eos, max_seq_len, cut)
        limit = transform.limit
        found = RowSource(source, filter_fn=filter_fn, **load_dataset_kwargs)
        self.source = found.shown
        fingerprint = Fingerprint()
        parts = {"dataset": type(self), "tokenizer": tokenizer, "column": column, "add_eos": add_eos, "limit": limit}
        for name, value in parts.items():
            fingerprint.add_part(name, value)
        found.add_to(fingerprint)

        def build(writers: Writers) -> dict[str, Any]:
            return transform_rows(found, TransformRows(transform, limit), writers)

        stores, info = prepare(fingerprint, ["rows"], self.source, build, found.prepared)
        self.store = stores["rows"]
        self._numbers = row_numbers(info, len(self), self.source)
        say_what_is_cut(info, len(self), self.source, limit)

    @property
    def lengths(self) -> np.ndarray:
        """int64 [rows]: tokens of every row."""
        return self.store.lengths

    @property
    def fingerprint(self) -> int:
        """Changes when any token does."""
        return self.store.fingerprint

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        """``tokens`` and pre-shifted ``labels``."""
        tokens, labels = self.store.arrays(index)
        return {"tokens": tokens.tolist(), "labels": labels.tolist()}

    def origins(self, index: int) -> list[dict[str, Any]]:
        """``source`` and ``row`` (counted from 0, after ``filter_fn``) of an example."""
        return [{"source": self.source, "row": int(self._numbers[index])}]


def text_completion_dataset(
    tokenizer: BaseTokenizer,
    source: Source,
    column: str = "text",
    add_eos: bool = True,
    packed: bool = False,
    split_across_pack: bool = True,
    split: str = "train",
    filter_fn: Callable[..., bool] | None = None,
    max_seq_len: int | None = None,
    **load_dataset_kwargs: Any,
) -> TextCompletionDataset | PackedDataset | StreamedDataset:
    """Rows of running text.

    Args:
        tokenizer: tokenizer of the model.
        source: a dataset of the hub, a folder, a file, a loader's name (``text``, ``json`` …), or rows in memory.
        column: the column with the text.
        add_eos: end every text with the end-of-sequence token.
        packed: put texts together into packs.
        split_across_pack: fill packs to the last token; texts are cut at the ends of packs, and nowhere else.
        split: split of the dataset.
        filter_fn: rows for which it is false are left out.
        max_seq_len: longest row or pack; by default the tokenizer's.
        **load_dataset_kwargs: arguments of ``datasets.load_dataset``, for example ``data_files``.

    Raises:
        DataError: see :class:`TextCompletionDataset`; ``packed`` without any ``max_seq_len``.

    Example:
        >>> data = torchtune.datasets.text_completion_dataset(tokenizer, source=[{"text": "the cat"}])
        >>> tokenizer.decode(list(data[0]["tokens"]))
        'the cat'
    """
    length = (max_seq_len or pack_length(tokenizer)) if packed else None
    if load_dataset_kwargs.get("streaming"):
        transform = TextTransform(tokenizer, column, add_eos, max_seq_len, not (packed and split_across_pack))
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
    dataset = TextCompletionDataset(
        tokenizer=tokenizer,
        source=source,
        column=column,
        add_eos=add_eos,
        filter_fn=filter_fn,
        max_seq_len=max_seq_len,
        cut=not (packed and split_across_pack),
        split=split,
        **load_dataset_kwargs,
    )
    if length is None:
        return dataset
    padding_idx = getattr(tokenizer, "pad_id", 0)
    return PackedDataset(dataset, max_seq_len=length, padding_idx=padding_idx, split_across_pack=split_across_pack)


def wikitext_dataset(
    tokenizer: BaseTokenizer,
    source: Source = "EleutherAI/wikitext_document_level",
    subset: str = "wikitext-103-v1",
    max_seq_len: int | None = None,
    packed: bool = False,
    filter_fn: Callable[..., bool] | None = None,
    split: str = "train",
    **load_dataset_kwargs: Any,
) -> TextCompletionDataset | PackedDataset:
    """Articles of Wikipedia, column ``page``; ``subset`` chooses the collection.

    For the other arguments see :func:`text_completion_dataset`.

    Raises:
        DataError: see :class:`TextCompletionDataset`; ``packed`` without any ``max_seq_len``.
    """
    return text_completion_dataset(
        tokenizer=tokenizer,
        source=source,
        column="page",
        max_seq_len=max_seq_len,
        packed=packed,
        filter_fn=filter_fn,
        split=split,
        name=subset,
        **load_dataset_kwargs,
    )


def cnn_dailymail_articles_dataset(
    tokenizer: BaseTokenizer,
    source: Source = "ccdv/cnn_dailymail",
    max_seq_len: int | None = None,
    filter_fn: Callable[..., bool] | None = None,
    split: str = "train",
    **load_dataset_kwargs: Any,
) -> TextCompletionDataset:
    """News articles, column ``article``. For the arguments see :func:`text_completion_dataset`.

    Raises:
        DataError: see :class:`TextCompletionDataset`.
    """
    load_dataset_kwargs.setdefault("name", "3.0.0")
    return TextCompletionDataset(
        tokenizer=tokenizer,
        source=source,
        column="article",
        max_seq_len=max_seq_len,
        filter_fn=filter_fn,
        split=split,
        **load_dataset_kwargs,
    )
