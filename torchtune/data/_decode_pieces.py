"""Text of token rows, with the trained tokens marked."""

import inspect
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from torchtune.data._common import CROSS_ENTROPY_IGNORE_IDX


def texts_of(row: Any) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Return (title, tokens, labels) of each text in a row: both answers of a pair, or the first document of a pack.

    The labels of prompts for generation are placeholders; they are replaced by the ignore index. For rows of other
    kinds, the list is empty.
    """
    row = row[0] if isinstance(row, list) else row
    found = []
    if isinstance(row, Mapping) and "chosen_input_ids" in row:
        found = [(side, row[f"{side}_input_ids"], row[f"{side}_labels"]) for side in ("chosen", "rejected")]
    elif isinstance(row, Mapping) and "tokens" in row and "labels" in row:
        label = f"labeled {'good' if row['is_chosen'] else 'bad'}" if "is_chosen" in row else ""
        ignored = np.full(len(row["tokens"]), CROSS_ENTROPY_IGNORE_IDX)
        found = [(label, row["tokens"], ignored if "number" in row else row["labels"])]
    return [(label, np.asarray(tokens), np.asarray(labels)) for label, tokens, labels in found]


def is_trained(labels: np.ndarray) -> np.ndarray:
    """Return whether each token is trained on, bool ``[s]``; ``labels[i]`` is the label of token i + 1."""
    return np.concatenate([[False], labels[:-1] != CROSS_ENTROPY_IGNORE_IDX])


def decode_pieces(tokens: np.ndarray, labels: np.ndarray, tokenizer: Any) -> list[tuple[str, bool]]:
    """Decode a row into pieces (text, whether its tokens are trained on), including special tokens.

    Args:
        tokens: ``[s]``.
        labels: ``[s]``; ``labels[i]`` is the token at ``i + 1``, or the ignore index.
        tokenizer: if it has no ``decode``, the result is one piece with a notice.
    """
    if not hasattr(tokenizer, "decode"):
        return [(f"(no text: {type(tokenizer).__name__} has no method decode)", False)]
    takes = inspect.signature(tokenizer.decode).parameters
    options = {name: False for name in ("skip_special_tokens", "truncate_at_eos") if name in takes}
    trained = is_trained(labels)
    edges = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(tokens)]
    return [
        (tokenizer.decode(tokens[start:end].tolist(), **options), bool(trained[start]))
        for start, end in pairwise(edges)
        if end > start
    ]
