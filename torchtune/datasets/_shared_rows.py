"""Rows that are in two datasets, for example in the training and the validation data of a run."""

from typing import Any

import numpy as np

from torchtune.data import ExampleDataset, as_example_dataset
from torchtune.datasets._token_store import digest_tokens
from torchtune.datasets._tokenized import TokenizedDataset
from torchtune.tokenizers import document_texts

# Rows of a dataset without a store of tokens are read one by one, so that more of them are not compared.
_MOST_READ = 20_000
# Odd multipliers of a digest modulo 2**64; another one for every answer of a row.
_ANSWER_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)


def count_shared_rows(held_out: Any, training: Any) -> tuple[int, int] | None:
    """Count the rows of a dataset that have the tokens of a row of another one.

    Args:
        held_out: dataset whose rows are counted; packs are compared by their rows.
        training: the other dataset.

    Returns:
        These rows, and all rows of ``held_out``. None if rows cannot be compared: streams, rows with images or
        transforms on reading, and more than 20,000 rows of a dataset that does not keep its tokens.

    Example:
        >>> rows = [{"tokens": [1, 2], "labels": [2, -100]}, {"tokens": [3], "labels": [-100]}]
        >>> torchtune.datasets.count_shared_rows(rows, rows[1:])
        (1, 2)
    """
    held_out_digests = _digest_rows(as_example_dataset(held_out))
    training_digests = _digest_rows(as_example_dataset(training))
    if held_out_digests is None or training_digests is None:
        return None
    return int(np.isin(held_out_digests, training_digests).sum()), len(held_out_digests)


def explain_shared_rows(held_out: Any, training: Any) -> str | None:
    """Return a sentence if rows of the validation data are training data; None if none is, or if it is not known.

    Args:
        held_out: dataset of the validation.
        training: dataset of the training.

    Example:
        >>> rows = [{"tokens": [1, 2], "labels": [2, -100]}, {"tokens": [3], "labels": [-100]}]
        >>> torchtune.datasets.explain_shared_rows(rows, rows[1:])[:39]
        '1 of its 2 rows are training data, too,'
    """
    counts = count_shared_rows(held_out, training)
    if counts is None or not counts[0]:
        return None
    num_shared, num_rows = counts
    described = f"{num_shared:,} of its {num_rows:,} rows"
    if num_shared == num_rows:
        described = f"all of its {num_rows:,} rows"
    return f"{described} are training data, too, so that it does not show how the model does on other rows"


def _digest_rows(dataset: ExampleDataset) -> np.ndarray | None:
    """Return a digest of each row's tokens, uint64 ``[rows]``; None if rows cannot be compared."""
    if dataset.is_stream:
        return None
    digests = []
    for rows in dataset.row_datasets():
        # The same text stands beside many images, and a transform on reading may draw random numbers.
        if rows.num_images or rows.on_reading:
            return None
        if isinstance(rows, TokenizedDataset):
            columns = [store.digests() for store in rows.stores.values()]
        elif len(rows) <= _MOST_READ:
            columns = _read_digests(rows)
        else:  # reading them one by one would take too long
            return None
        digest = np.zeros(len(rows), np.uint64)
        with np.errstate(over="ignore"):  # digests are numbers modulo 2**64
            # A row has one text, or one for each answer, of which the first two are compared.
            for column, factor in zip(columns, _ANSWER_FACTORS, strict=False):
                digest += column * np.uint64(factor)
        digests.append(digest)
    return np.concatenate(digests)


def _read_digests(dataset: ExampleDataset) -> list[np.ndarray]:
    """Return a column of digests for each number of a text: uint64 ``[rows]``, as stores of tokens have them.

    A row with fewer texts than others has the digest of an empty text in the last columns.
    """
    rows = []
    for index in range(len(dataset)):
        rows.append([tokens for _, tokens, _ in document_texts(dataset[index])])
    columns = []
    no_text = np.zeros(0, dtype=np.int64)
    most_texts = max(map(len, rows), default=0)
    for number in range(most_texts):
        texts = []
        for row in rows:
            text = no_text
            if number < len(row):
                text = row[number]
            texts.append(text)
        offsets = np.cumsum([0, *map(len, texts)])
        columns.append(digest_tokens(np.concatenate(texts), offsets))
    return columns
