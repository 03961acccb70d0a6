"""Text of token rows, with the trained tokens marked."""

import inspect
from itertools import pairwise
from typing import Any

import numpy as np

from torchtune.data._common import CROSS_ENTROPY_IGNORE_IDX


def decode_pieces(tokens: np.ndarray, labels: np.ndarray, tokenizer: Any) -> list[tuple[str, bool]]:
    """Decode a row into (text, whether its tokens are trained), special tokens included.

    Args:
        tokens: ``[s]``.
        labels: ``[s]``; ``labels[i]`` is the token at ``i + 1``, or the ignore index.
        tokenizer: without ``decode``, the only piece says so.
    """
    if not hasattr(tokenizer, "decode"):
        return [(f"(no text: {type(tokenizer).__name__} has no method decode)", False)]
    takes = inspect.signature(tokenizer.decode).parameters
    options = {name: False for name in ("skip_special_tokens", "truncate_at_eos") if name in takes}
    trained = np.concatenate([[False], labels[:-1] != CROSS_ENTROPY_IGNORE_IDX])
    edges = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(tokens)]
    return [
        (tokenizer.decode(tokens[start:end].tolist(), **options), bool(trained[start]))
        for start, end in pairwise(edges)
        if end > start
    ]
