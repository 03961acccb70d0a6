"""Datasets for retrieval: queries with passages for embedding models, and with candidates for rerankers."""

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from torchtune.data import (
    CROSS_ENTROPY_IGNORE_IDX,
    DEFAULT_PAIR_TEMPLATE,
    DataError,
    PairTemplate,
    check_column_map,
    column,
    text_column,
    warn_of_row_weight,
)
from torchtune.datasets._row_formats import RERANKING, RETRIEVAL
from torchtune.datasets._row_source import RowSource, Source
from torchtune.datasets._token_store import TokenStore
from torchtune.datasets._tokenized import Tokenize, TokenizedDataset, prepare_rows
from torchtune.tokenizers import BaseTokenizer, check_tokenizer, end_of_text
from torchtune.utils import get_logger, log_rank_zero


def _read_text(row: Mapping[str, Any], name: str) -> str:
    """Return a text of a row; raise :class:`DataError` if it is missing or empty."""
    text = text_column(row, name)
    if not text.strip():
        raise DataError(f"column '{name}' has an empty text")
    return text


def _read_negatives(row: Mapping[str, Any], name: str, *, is_required: bool) -> list[str]:
    """Return the texts of a row that do not answer its query: a list of texts, one text, or nothing.

    Args:
        row: the row.
        name: column of the texts.
        is_required: whether the row must have the column.

    Raises:
        DataError: the column is missing, holds something else, or has an empty text.
    """
    value = row.get(name)
    if is_required:
        value = column(row, name)
    if value is None:
        return []
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise DataError(f"column '{name}' must hold a text or a list of texts")
    if not all(text.strip() for text in value):
        raise DataError(f"column '{name}' has an empty text")
    return value


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
        query = self._tokens(self._query_instruction + _read_text(row, self.column_map["query"]))
        positive = self._tokens(self._document_instruction + _read_text(row, self.column_map["positive"]))
        texts = [query, positive]
        column_of_negatives = self.column_map.get("negatives", "negatives")
        negatives = _read_negatives(row, column_of_negatives, is_required=self._needs_negatives)
        for number, text in enumerate(negatives):
            negative = self._tokens(self._document_instruction + text)
            if negative == positive:  # the loss would push a text away from its query and towards it
                problem = f"negative {number} equals the positive"
                if self.limit is not None and len(negative) >= self.limit:
                    problem += f" within max_seq_len={self.limit}"
                raise DataError(problem)
            texts.append(negative)
        return texts

    def sample(self, row: Mapping[str, Any]) -> dict[str, list[int]]:
        """Return the texts of a row one after the other, for the store; the label -100 marks the last token of each."""
        tokens: list[int] = []
        labels: list[int] = []
        for text in self(row):
            tokens += text
            labels += [*text[1:], CROSS_ENTROPY_IGNORE_IDX]
        return {"tokens": tokens, "labels": labels}

    def _tokens(self, text: str) -> list[int]:
        """Return the tokens of a text, truncated on the right, with the tokens at its end."""
        tokens = list(self._encode(text=text, add_bos=True, add_eos=False))
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

        row_source = RowSource(source, filter_fn=filter_fn, **load_dataset_kwargs)
        rows = prepare_rows(
            row_source,
            Tokenize(transform.sample, needs_labels=False),  # no token is predicted: labels only mark the ends of texts
            {
                "dataset": type(self),
                "tokenizer": tokenizer,
                "columns": transform.column_map,
                "instructions": [query_instruction, document_instruction],
                "end": transform.end,  # instead of add_eos, whose default depends on the tokenizer's files
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
            if end:  # most tokenizers end texts with nothing, which needs no message
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
        longest = []
        for index in range(len(self)):
            texts = _texts(self.store, index)
            longest.append(max(map(len, texts)))
        return np.array(longest, np.int64)


def _texts(store: TokenStore, index: int) -> list[list[int]]:
    """Return the texts of a row; see :meth:`RetrievalTransform.sample`."""
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


_COLUMNS = {
    "query": "query",
    "positive": "positive",
    "negatives": "negatives",
    "document": "document",
    "label": "label",
}


class PairTransform:
    """Converts a row to its pairs of a query and a document, with labels; see :class:`RerankingDataset`."""

    def __init__(
        self, tokenizer: Any, column_map: Mapping[str, str] | None, template: PairTemplate, max_seq_len: int | None
    ) -> None:
        check_tokenizer(tokenizer, "encode", reader="a dataset of pairs")
        self._tokenizer = tokenizer
        self._template = template
        self.column_map = _COLUMNS | check_column_map(column_map, _COLUMNS, ("query",))
        self.limit = max_seq_len or getattr(tokenizer, "max_seq_len", None)

    def __call__(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return a sample for each pair: its tokens, and ``[label, query]`` as note.

        A row with a document and a label has one pair, with the query; a row with a positive has several, with ``None``
        in its place, because they are candidates of each other already.

        Raises:
            DataError: a text is missing or empty, a negative equals the positive, or the label is not a number from 0
                to 1.
        """
        warn_of_row_weight(row, "a dataset for rerankers")
        query = _read_text(row, self.column_map["query"])
        # Without either column, the message names the one of a pair.
        if self.column_map["document"] in row or self.column_map["positive"] not in row:
            document = _read_text(row, self.column_map["document"])
            return [self._sample(query, document, self._label(row), query)]
        positive = _read_text(row, self.column_map["positive"])
        negatives = _read_negatives(row, self.column_map["negatives"], is_required=False)
        samples = [self._sample(query, positive, 1.0, None)]
        for number, negative in enumerate(negatives):
            if negative == positive:
                raise DataError(f"negative {number} equals the positive")
            samples.append(self._sample(query, negative, 0.0, None))
        return samples

    def _sample(self, query: str, document: str, label: float, key: str | None) -> dict[str, Any]:
        tokens = self._template.tokens(self._tokenizer, query, document, self.limit)
        # No token is predicted: the labels only say that all tokens are read.
        labels = [*tokens[1:], CROSS_ENTROPY_IGNORE_IDX]
        return {"tokens": tokens, "labels": labels, "note": [label, key]}

    def _label(self, row: Mapping[str, Any]) -> float:
        """Return the label of a row; raise :class:`DataError` if it is not a number from 0 to 1."""
        name = self.column_map["label"]
        value = column(row, name)
        if not isinstance(value, int | float) or not math.isfinite(value) or not 0 <= value <= 1:
            raise DataError(f"column '{name}' holds {value!r:.40}, not a number from 0 (irrelevant) to 1 (relevant)")
        return float(value)


class RerankingDataset(TokenizedDataset):
    """Dataset of queries with candidate documents, for models with one output that score a pair.

    A row has a query and a document with its ``label`` (from 0, irrelevant, to 1, relevant), or a query with a positive
    and negatives, whose labels are 1 and 0. An example is a pair, or with ``listwise`` a query with all its candidates:
    those of its row, or all rows of the same query.

    Args:
        tokenizer: has ``encode(text, add_bos, add_eos)``, or ``encode_text``, and ``max_seq_len``.
        source: Hub dataset, folder, file, loader name, or rows in memory.
        column_map: columns of ``query``, and of ``document`` and ``label`` or ``positive`` and ``negatives``; by
            default the same names.
        template: text with ``{query}`` and ``{document}``; see :class:`torchtune.data.PairTemplate`.
        listwise: make an example of all candidates of a query.
        add_eos: end every pair with the EOS token.
        filter_fn: function of a row; rows for which it returns False are dropped.
        max_seq_len: pairs are truncated to it; by default the tokenizer's.
        **load_dataset_kwargs: passed to ``datasets.load_dataset``.

    Attributes:
        listwise: whether an example is a query with its candidates.
        pair_template: the template.

    Raises:
        DataError: the data cannot be loaded, has no rows, has rows that cannot be trained on (listed by number), or has
            labels from which nothing can be learned: all equal, or with ``listwise`` a query with only one document or
            without a label above 0.

    Example:
        >>> rows = [{"query": "who sees", "positive": "the cat sees", "negatives": ["one dog"]}]
        >>> data = torchtune.datasets.RerankingDataset(tokenizer, rows, listwise=True)
        >>> len(data), data[0]["targets"]
        (1, [1.0, 0.0])
    """

    def __init__(
        self,
        tokenizer: BaseTokenizer,
        source: Source,
        column_map: Mapping[str, str] | None = None,
        template: str = DEFAULT_PAIR_TEMPLATE,
        listwise: bool = False,
        add_eos: bool = False,
        filter_fn: Callable[..., bool] | None = None,
        max_seq_len: int | None = None,
        **load_dataset_kwargs: Any,
    ) -> None:
        if add_eos and tokenizer.eos_id is not None and getattr(tokenizer, "pad_id", None) == tokenizer.eos_id:
            raise DataError(
                "add_eos: the EOS token of this tokenizer is its padding token, too, and transformers scores the last "
                "token that is not padding: end the template with another text instead."
            )
        self.listwise = listwise
        self.pair_template = PairTemplate(template, add_eos)
        transform = PairTransform(tokenizer, column_map, self.pair_template, max_seq_len)
        row_source = RowSource(source, filter_fn=filter_fn, **load_dataset_kwargs)
        rows = prepare_rows(
            row_source,
            Tokenize(transform, has_notes=True, needs_labels=False),  # the notes are (label, query)
            # Without listwise, which only groups the stored pairs.
            {
                "dataset": type(self),
                "tokenizer": tokenizer,
                "columns": transform.column_map,
                "template": template,
                "add_eos": add_eos,
                "limit": transform.limit,
            },
            formats=(RERANKING, RETRIEVAL),
        )
        self._labels = np.array([label for label, _ in rows.notes])
        self._examples = [[pair] for pair in range(len(rows.notes))]  # pairs of each example
        if listwise:
            # The candidates of a query are those of its row, or all rows with one document and the same query.
            keys: list[int | str] = []
            for row, (_, query) in zip(rows.numbers.tolist(), rows.notes, strict=True):
                if query is None:
                    keys.append(row)
                else:
                    keys.append(query)
            self._examples = _indices_by_key(keys)
        super().__init__(row_source, rows, limit=transform.limit)
        self._check_labels()

    def _check_labels(self) -> None:
        """Raise :class:`DataError` for labels from which nothing can be learned.

        The loss of a pair needs different labels in the dataset, that of a list different labels within each query.
        """
        if not self.listwise:
            if len(set(self._labels.tolist())) == 1:
                raise DataError(
                    f"{self.source}: all pairs have the label {self._labels[0]:g}, from which nothing can be learned: "
                    "give every query documents that answer it and documents that do not."
                )
            return
        for pairs in self._examples:
            row = self._numbers[pairs[0]]
            if len(pairs) == 1:
                raise DataError(
                    f"{self.source}: the query of row {row} has one document only, so that there is nothing to compare "
                    "it with: give it another one, or train on pairs without listwise."
                )
            labels = self._labels[pairs]
            if labels.min() == labels.max():
                raise DataError(
                    f"{self.source}: all {len(pairs)} documents of the query of row {row} have the label "
                    f"{labels[0]:g}: give it documents that answer it and documents that do not."
                )

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the token ids of all ``documents`` (each with its query), their ``targets``, and ``labels``, [0]."""
        pairs = self._examples[index]
        documents = [self.store.lists(pair)["tokens"] for pair in pairs]
        return {"documents": documents, "targets": self._labels[pairs].tolist(), "labels": [0]}

    def token_row(self, index: int) -> dict[str, Any]:
        """See :class:`torchtune.data.ExampleDataset`; the pairs of a row are apart."""
        return self[index]

    @property
    def known_lengths(self) -> np.ndarray:
        """Number of tokens of each example, int64 ``[examples]``."""
        lengths = self.store.lengths
        return np.array([lengths[pairs].sum() for pairs in self._examples], np.int64)

    def origins(self, index: int) -> list[dict[str, Any]]:
        """See :class:`torchtune.data.ExampleDataset`."""
        rows = dict.fromkeys(int(self._numbers[pair]) for pair in self._examples[index])
        return [{"source": self.source, "row": row} for row in rows]

    @property
    def fingerprint(self) -> tuple[int, ...]:
        """Digest of all tokens and labels, and of the examples."""
        return self.store.fingerprint, int(self.listwise)

    def _keep(self, rows: np.ndarray) -> None:
        """Keep some pairs, int64 ``[kept]``; see the base class."""
        example_of = {}  # pair -> its example
        for example, pairs in enumerate(self._examples):
            example_of.update(dict.fromkeys(pairs, example))
        super()._keep(rows)
        self._labels = self._labels[rows]
        # Pairs are numbered anew. The candidates of an example that are left stay together.
        self._examples = _indices_by_key(example_of[former_pair] for former_pair in rows.tolist())
        self._check_labels()


def _indices_by_key(keys: Iterable[int | str]) -> list[list[int]]:
    """Return the indices of equal keys together, in the order of the first of each."""
    indices_of: dict[int | str, list[int]] = {}
    for index, key in enumerate(keys):
        indices_of.setdefault(key, []).append(index)
    return list(indices_of.values())


def reranking_dataset(
    tokenizer: BaseTokenizer,
    source: Source,
    column_map: Mapping[str, str] | None = None,
    template: str = DEFAULT_PAIR_TEMPLATE,
    listwise: bool = False,
    add_eos: bool = False,
    split: str = "train",
    filter_fn: Callable[..., bool] | None = None,
    max_seq_len: int | None = None,
    **load_dataset_kwargs: Any,
) -> RerankingDataset:
    """Build a dataset of pairs of a query and a document, for :class:`torchtune.rlhf.loss.RerankBCELoss`.

    With ``listwise``, it is for :class:`torchtune.rlhf.loss.RerankListwiseLoss`.

    Args:
        tokenizer: tokenizer of the model.
        source: Hub dataset, folder, file, loader name (``json``, ``parquet`` …), or rows in memory.
        column_map: columns of ``query``, and of ``document`` and ``label`` or ``positive`` and ``negatives``; by
            default the same names.
        template: text with ``{query}`` and ``{document}``; see :class:`torchtune.data.PairTemplate`.
        listwise: make an example of all candidates of a query, instead of one of each pair.
        add_eos: end every pair with the EOS token.
        split: split of the dataset.
        filter_fn: function of a row; rows for which it returns False are dropped.
        max_seq_len: pairs are truncated to it; by default the tokenizer's.
        **load_dataset_kwargs: passed to ``datasets.load_dataset``, for example ``data_files``.

    Raises:
        DataError: see :class:`RerankingDataset`; ``streaming`` is set.

    Example:
        >>> pairs = [("the cat sees", 1), ("one dog", 0)]
        >>> rows = [{"query": "who sees", "document": document, "label": label} for document, label in pairs]
        >>> len(torchtune.datasets.reranking_dataset(tokenizer, source=rows))
        2
    """
    if load_dataset_kwargs.get("streaming"):
        raise DataError("reranking_dataset reads all rows before training: leave out streaming.")
    return RerankingDataset(
        tokenizer=tokenizer,
        source=source,
        column_map=column_map,
        template=template,
        listwise=listwise,
        add_eos=add_eos,
        filter_fn=filter_fn,
        max_seq_len=max_seq_len,
        split=split,
        **load_dataset_kwargs,
    )
