"""Dataset for rerankers: queries with candidate documents and their labels."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from torchtune.datasets._tokenized import Tokenize, TokenizedDataset, prepare_rows
from torchtune.tokenizers import BaseTokenizer, check_tokenizer

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

    def __call__(self, row: Mapping[str, Any]) -> list[dict[str, dict[str, Any]]]:
        """Return a sample for each pair: its tokens, and ``[label, query]`` as note.

        A row with a document and a label has one pair, with the query; a row with a positive has several, with ``None``
        in its place, because they are candidates of each other already.

        Raises:
            DataError: a text is missing or empty, a negative equals the positive, or the label is not a number from 0
                to 1.
        """
        warn_of_row_weight(row, "a dataset for rerankers")
        query = self._text(row, "query")
        if self.column_map["document"] in row or self.column_map["positive"] not in row:
            document = self._text(row, "document")
            return [self._sample(query, document, self._label(row), query)]
        positive = self._text(row, "positive")
        samples = [self._sample(query, positive, 1.0, None)]
        for number, negative in enumerate(self._negatives(row)):
            if negative == positive:
                raise DataError(f"negative {number} equals the positive")
            samples.append(self._sample(query, negative, 0.0, None))
        return samples

    def _sample(self, query: str, document: str, label: float, key: str | None) -> dict[str, dict[str, Any]]:
        tokens = self._template.tokens(self._tokenizer, query, document, self.limit)
        # No token is predicted: the labels only say that all tokens are read.
        labels = [*tokens[1:], CROSS_ENTROPY_IGNORE_IDX]
        return {"rows": {"tokens": tokens, "labels": labels, "note": [label, key]}}

    def _text(self, row: Mapping[str, Any], key: str) -> str:
        text = text_column(row, self.column_map[key])
        if not text.strip():
            raise DataError(f"column '{self.column_map[key]}' has an empty text")
        return text

    def _negatives(self, row: Mapping[str, Any]) -> list[str]:
        name = self.column_map["negatives"]
        value = row.get(name)
        if value is None:
            return []
        if isinstance(value, str):
            value = [value]
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise DataError(f"column '{name}' must hold a text or a list of texts")
        if not all(text.strip() for text in value):
            raise DataError(f"column '{name}' has an empty text")
        return value

    def _label(self, row: Mapping[str, Any]) -> float:
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
            Tokenize(transform, ["rows"]),
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
            self._examples = _candidates(rows.numbers.tolist(), [query for _, query in rows.notes])
        super().__init__(row_source, rows, limit=transform.limit)
        self._check_labels()

    def _check_labels(self) -> None:
        """Raise :class:`DataError` for labels from which nothing can be learned."""
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
        example_of = {}
        for example, pairs in enumerate(self._examples):
            example_of.update(dict.fromkeys(pairs, example))
        super()._keep(rows)
        self._labels = self._labels[rows]
        self._examples = _indices_by_key(example_of[former_pair] for former_pair in rows.tolist())
        self._check_labels()


def _candidates(numbers: Sequence[int], queries: Sequence[str | None]) -> list[list[int]]:
    """Return the pairs of each query, in the order of the first.

    Args:
        numbers: row of each pair.
        queries: query of each pair of a row with one document; ``None`` for rows with several.
    """
    keys: list[int | str] = []
    for number, query in zip(numbers, queries, strict=True):
        keys.append(number if query is None else query)
    return _indices_by_key(keys)


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
