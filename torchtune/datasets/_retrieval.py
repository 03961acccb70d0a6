"""Dataset for embedding models: queries with a text that answers them, and texts that do not."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from torchtune.data import (
    CROSS_ENTROPY_IGNORE_IDX,
    DataError,
    check_column_map,
    column,
    text_column,
    warn_of_row_weight,
)
from torchtune.datasets._row_formats import RETRIEVAL
from torchtune.datasets._row_source import RowSource, Source
from torchtune.datasets._token_store import TokenStore
from torchtune.datasets._tokenized import Tokenize, TokenizedDataset, prepare_rows
from torchtune.tokenizers import BaseTokenizer, check_tokenizer, end_of_text
from torchtune.utils import get_logger, log_rank_zero


class RetrievalTransform:
    """Converts a row to the token ids of its texts; see :class:`EmbeddingDataset`."""

    def __init__(
        self,
        tokenizer: Any,
        column_map: Mapping[str, str] | None,
        query_instruction: str,
        document_instruction: str,
        add_eos: bool | None,
        max_seq_len: int | None,
    ) -> None:
        check_tokenizer(tokenizer, "encode", reader="a dataset of texts")
        # Control tokens in a text are plain text; tokenizers without `encode_text` never parse them.
        self._encode = getattr(tokenizer, "encode_text", tokenizer.encode)
        self.end = end_of_text(tokenizer, add_eos)
        defaults = {"query": "query", "positive": "positive", "negatives": "negatives"}
        self.column_map = check_column_map(column_map, defaults, ("query", "positive"))
        # A column of negatives may be missing, unless the user has named it.
        self._needs_negatives = column_map is not None and "negatives" in column_map
        self._query_instruction = query_instruction
        self._document_instruction = document_instruction
        self.limit = max_seq_len or getattr(tokenizer, "max_seq_len", None)

    def __call__(self, row: Mapping[str, Any]) -> list[list[int]]:
        """Return the tokens of the query, the positive and each negative.

        Raises:
            DataError: a text is missing or empty, or a negative equals the positive.
        """
        warn_of_row_weight(row, "a dataset for embedding models")
        query = self._tokens(
            text_column(row, self.column_map["query"]), self._query_instruction, self.column_map["query"]
        )
        positive = self._tokens(
            text_column(row, self.column_map["positive"]), self._document_instruction, self.column_map["positive"]
        )
        texts = [query, positive]
        for number, text in enumerate(self._negatives(row)):
            name = self.column_map.get("negatives", "negatives")
            negative = self._tokens(text, self._document_instruction, name)
            if negative == positive:
                is_cut = self.limit is not None and len(negative) >= self.limit
                within = f" within max_seq_len={self.limit}" if is_cut else ""
                raise DataError(f"negative {number} equals the positive{within}")
            texts.append(negative)
        return texts

    def _negatives(self, row: Mapping[str, Any]) -> list[str]:
        name = self.column_map.get("negatives", "negatives")
        value = column(row, name) if self._needs_negatives else row.get(name)
        if value is None:
            return []
        if isinstance(value, str):
            return [value]
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise DataError(f"column '{name}' must hold a text or a list of texts")
        return value

    def _tokens(self, text: str, instruction: str, name: str) -> list[int]:
        """Return the tokens of a text after its instruction, truncated on the right, with the tokens at its end."""
        if not text.strip():
            raise DataError(f"column '{name}' has an empty text")
        tokens = list(self._encode(text=instruction + text, add_bos=True, add_eos=False))
        if self.limit is not None:
            tokens = tokens[: self.limit - len(self.end)]
        return tokens + self.end


class EmbeddingDataset(TokenizedDataset):
    """Dataset of queries, each with a positive (a text that answers it) and any number of negatives.

    The texts are tokenized at construction, as :meth:`tokenizer.encode` does: with the BOS token, if the tokenizer adds
    it, and without a chat template.

    Args:
        tokenizer: has ``encode(text, add_bos, add_eos)``, or ``encode_text``, and ``max_seq_len``.
        source: Hub dataset, folder, file, loader name, or rows in memory.
        column_map: columns of ``query``, ``positive`` and ``negatives``; by default the same names. Negatives are a
            list of texts, or one text; the column may be missing unless it is named here.
        query_instruction: text before every query, for example ``"query: "``.
        document_instruction: text before every positive and negative.
        add_eos: end every text with the EOS token; by default, texts end as the tokenizer's files say.
        filter_fn: function of a row; rows for which it returns False are dropped.
        max_seq_len: texts are truncated to it; by default the tokenizer's.
        **load_dataset_kwargs: passed to ``datasets.load_dataset``.

    Attributes:
        instructions: ``query`` and ``document``, the texts before queries and documents.
        add_eos: see above.

    Raises:
        DataError: the data cannot be loaded, has no rows, or has rows that cannot be trained on (listed by number):
            without a query or a positive, or with a negative that equals the positive.

    Example:
        >>> rows = [{"query": "who sees", "positive": "the cat sees", "negatives": ["one dog"]}]
        >>> data = torchtune.datasets.EmbeddingDataset(tokenizer, rows)
        >>> tokenizer.decode(data[0]["positive"]), len(data[0]["negatives"])
        ('the cat sees', 1)
    """

    def __init__(
        self,
        tokenizer: BaseTokenizer,
        source: Source,
        column_map: Mapping[str, str] | None = None,
        query_instruction: str = "",
        document_instruction: str = "",
        add_eos: bool | None = None,
        filter_fn: Callable[..., bool] | None = None,
        max_seq_len: int | None = None,
        **load_dataset_kwargs: Any,
    ) -> None:
        transform = RetrievalTransform(
            tokenizer, column_map, query_instruction, document_instruction, add_eos, max_seq_len
        )

        def samples(row: Mapping[str, Any]) -> list[dict[str, dict[str, Any]]]:
            return [{"rows": _join(transform(row))}]

        row_source = RowSource(source, filter_fn=filter_fn, **load_dataset_kwargs)
        rows = prepare_rows(
            row_source,
            Tokenize(samples, ["rows"]),
            {
                "dataset": type(self),
                "tokenizer": tokenizer,
                "columns": transform.column_map,
                "instructions": [query_instruction, document_instruction],
                "end": transform.end,
                "limit": transform.limit,
            },
            formats=(RETRIEVAL,),
        )
        super().__init__(row_source, rows, limit=transform.limit, are_only_tokens=True)
        self.instructions = {"query": query_instruction, "document": document_instruction}
        self.add_eos = add_eos
        self._log_end(tokenizer, transform.end)

    def _log_end(self, tokenizer: BaseTokenizer, end: list[int]) -> None:
        """Log how texts end, if the tokenizer's files say so, and warn if they end differently."""
        published = end_of_text(tokenizer, None)
        if end == published:
            if end:
                text = tokenizer.decode(end, skip_special_tokens=False)
                log_rank_zero(get_logger(), f"Texts end with {text}, as the tokenizer's files say.")
            return
        log_rank_zero(
            get_logger(),
            f"add_eos={self.add_eos} ends texts otherwise than the tokenizer's files, by which sentence-transformers "
            "would compute other embeddings: leave it out, if the model is to be used there.",
            logging.WARNING,
        )

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the token ids of ``query``, ``positive`` and ``negatives``, and ``labels``.

        ``labels`` is ``[0]``, the number of the right text among the positive and the negatives.
        """
        query, positive, *negatives = _texts(self.store, index)
        return {"query": query, "positive": positive, "negatives": negatives, "labels": [0]}

    def token_row(self, index: int) -> dict[str, Any]:
        """See :class:`torchtune.data.ExampleDataset`; the texts of a row are apart."""
        return self[index]

    def _text_lengths(self) -> np.ndarray:
        longest = [max(map(len, _texts(self.store, index))) for index in range(len(self))]
        return np.array(longest, np.int64)


def _join(texts: list[list[int]]) -> dict[str, list[int]]:
    """Concatenate the texts of a row for the store; the label -100 marks the last token of each."""
    tokens: list[int] = []
    labels: list[int] = []
    for text in texts:
        tokens += text
        labels += [*text[1:], CROSS_ENTROPY_IGNORE_IDX]
    return {"tokens": tokens, "labels": labels}


def _texts(store: TokenStore, index: int) -> list[list[int]]:
    """Return the texts of a row; see :func:`_join`."""
    row = store.lists(index)
    texts = []
    start = 0
    for position, label in enumerate(row["labels"]):
        if label == CROSS_ENTROPY_IGNORE_IDX:
            texts.append(row["tokens"][start : position + 1])
            start = position + 1
    return texts


def embedding_dataset(
    tokenizer: BaseTokenizer,
    source: Source,
    column_map: Mapping[str, str] | None = None,
    query_instruction: str = "",
    document_instruction: str = "",
    add_eos: bool | None = None,
    split: str = "train",
    filter_fn: Callable[..., bool] | None = None,
    max_seq_len: int | None = None,
    **load_dataset_kwargs: Any,
) -> EmbeddingDataset:
    """Build a dataset of queries with passages, for :class:`torchtune.rlhf.loss.InfoNCELoss`.

    Args:
        tokenizer: tokenizer of the model.
        source: Hub dataset, folder, file, loader name (``json``, ``parquet`` …), or rows in memory.
        column_map: columns of ``query``, ``positive`` and ``negatives``; by default the same names.
        query_instruction: text before every query, for example ``"query: "``.
        document_instruction: text before every positive and negative.
        add_eos: end every text with the EOS token; by default, texts end as the tokenizer's files say.
        split: split of the dataset.
        filter_fn: function of a row; rows for which it returns False are dropped.
        max_seq_len: texts are truncated to it; by default the tokenizer's.
        **load_dataset_kwargs: passed to ``datasets.load_dataset``, for example ``data_files``.

    Raises:
        DataError: see :class:`EmbeddingDataset`; ``streaming`` is set.

    Example:
        >>> rows = [{"query": "who sees", "positive": "the cat sees"}]
        >>> len(torchtune.datasets.embedding_dataset(tokenizer, source=rows, query_instruction="query: "))
        1
    """
    if load_dataset_kwargs.get("streaming"):
        raise DataError("embedding_dataset reads all rows before training: leave out streaming.")
    return EmbeddingDataset(
        tokenizer=tokenizer,
        source=source,
        column_map=column_map,
        query_instruction=query_instruction,
        document_instruction=document_instruction,
        add_eos=add_eos,
        filter_fn=filter_fn,
        max_seq_len=max_seq_len,
        split=split,
        **load_dataset_kwargs,
    )
