"""Plain text datasets: every token is trained on."""

from collections.abc import Callable, Mapping
from typing import Any

from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, text_column, truncate, warn_of_row_weight
from torchtune.datasets._packed import PackedDataset, pack_length
from torchtune.datasets._row_formats import LABELED_TEXTS, RAW_TEXT
from torchtune.datasets._row_source import RowSource, Source
from torchtune.datasets._streamed import StreamedDataset
from torchtune.datasets._tokenized import RowTokenizer, TokenizedDataset, prepare_rows
from torchtune.tokenizers import BaseTokenizer, check_tokenizer


class TextTransform:
    """Converts a row of text to tokens and labels; see :class:`TextCompletionDataset`."""

    def __init__(self, tokenizer: Any, column: str, add_eos: bool, max_seq_len: int | None, cut: bool) -> None:
        check_tokenizer(tokenizer, "encode", reader="a dataset of texts")
        # Control tokens in a document are plain text; tokenizers without `encode_text` never parse them.
        self._encode = getattr(tokenizer, "encode_text", tokenizer.encode)
        self._column = column
        self._add_eos = add_eos
        length = max_seq_len or getattr(tokenizer, "max_seq_len", None)
        self.limit = None
        if cut and length is not None:
            self.limit = length - 1

    def __call__(self, row: Mapping[str, Any]) -> dict[str, list[int]]:
        """Return ``tokens`` and pre-shifted ``labels``; raise :class:`DataError` for a row without text."""
        warn_of_row_weight(row, "a dataset of plain texts")
        text = text_column(row, self._column)
        tokens = self._encode(text=text, add_bos=True, add_eos=self._add_eos)
        if self.limit is not None:
            tokens = truncate(tokens, self.limit)
        return {"tokens": tokens, "labels": [*tokens[1:], CROSS_ENTROPY_IGNORE_IDX]}


class TextCompletionDataset(TokenizedDataset):
    """Dataset of plain text, tokenized at construction.

    A text starts with the BOS token if the tokenizer adds it, and ends with the EOS token. Control tokens in a text,
    such as ``<|im_end|>``, are plain text, unless the tokenizer has ``parse_special_tokens=True``.

    Args:
        tokenizer: has ``encode(text, add_bos, add_eos)``, or ``encode_text``, and ``max_seq_len``.
        source: Hub dataset, folder, file, loader name, or rows in memory.
        column: column with the text.
        add_eos: end every text with the EOS token.
        filter_fn: function of a row; rows for which it returns False are dropped.
        max_seq_len: texts are truncated to ``max_seq_len - 1`` tokens; by default the tokenizer's.
        cut: whether to truncate texts.
        **load_dataset_kwargs: passed to ``datasets.load_dataset``.

    Raises:
        DataError: the data cannot be loaded, has no rows, or has rows without text (listed by number).

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
        row_source = RowSource(source, filter_fn=filter_fn, **load_dataset_kwargs)
        rows = prepare_rows(
            row_source,
            RowTokenizer(transform, limit=transform.limit),
            {
                "dataset": type(self),
                "tokenizer": tokenizer,
                "column": column,
                "add_eos": add_eos,
                "limit": transform.limit,
            },
            formats=(RAW_TEXT, LABELED_TEXTS),
        )
        super().__init__(row_source, rows, limit=transform.limit, are_divided=not cut, are_only_tokens=True)


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
    """Build a dataset of plain text.

    Args:
        tokenizer: tokenizer of the model.
        source: Hub dataset, folder, file, loader name (``text``, ``json`` …), or rows in memory.
        column: column with the text.
        add_eos: end every text with the EOS token.
        packed: pack texts.
        split_across_pack: fill packs completely; texts are split at the ends of packs and never truncated.
        split: split of the dataset.
        filter_fn: function of a row; rows for which it returns False are dropped.
        max_seq_len: maximum row or pack length in tokens; by default the tokenizer's.
        **load_dataset_kwargs: passed to ``datasets.load_dataset``, for example ``data_files``.

    Raises:
        DataError: ``packed`` is True but there is no ``max_seq_len``; further cases in :class:`TextCompletionDataset`.

    Example:
        >>> data = torchtune.datasets.text_completion_dataset(tokenizer, source=[{"text": "the cat"}])
        >>> tokenizer.decode(list(data[0]["tokens"]))
        'the cat'
    """
    # The ending is that of pretokenized_dataset, written out: `tune validate` follows **load_dataset_kwargs to the
    # classes that are called here, which it could not do through a function that is given the class.
    length = None
    if packed:  # fails before the rows are read
        length = max_seq_len or pack_length(tokenizer)
    cut = not (packed and split_across_pack)
    if load_dataset_kwargs.get("streaming"):
        transform = TextTransform(tokenizer, column, add_eos, max_seq_len, cut)
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
        cut=cut,
        split=split,
        **load_dataset_kwargs,
    )
    if length is None:
        return dataset
    return PackedDataset(dataset, max_seq_len=length, split_across_pack=split_across_pack)


def wikitext_dataset(
    tokenizer: BaseTokenizer,
    source: Source = "EleutherAI/wikitext_document_level",
    subset: str = "wikitext-103-v1",
    **settings: Any,
) -> TextCompletionDataset | PackedDataset | StreamedDataset:
    """Build a dataset of Wikipedia articles, column ``page``; ``subset`` selects the configuration.

    Other arguments: see :func:`text_completion_dataset`.

    Raises:
        DataError: ``packed`` is True without a ``max_seq_len``; further cases in :class:`TextCompletionDataset`.
    """
    return text_completion_dataset(tokenizer, source, column="page", name=subset, **settings)


def cnn_dailymail_articles_dataset(
    tokenizer: BaseTokenizer, source: Source = "ccdv/cnn_dailymail", **settings: Any
) -> TextCompletionDataset | PackedDataset | StreamedDataset:
    """Build a dataset of news articles, column ``article``.

    Other arguments: see :func:`text_completion_dataset`.

    Raises:
        DataError: ``packed`` is True without a ``max_seq_len``; further cases in :class:`TextCompletionDataset`.
    """
    settings.setdefault("name", "3.0.0")
    return text_completion_dataset(tokenizer, source, column="article", **settings)
