"""Streaming decoder."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from torchtune.data import CROSS_ENTROPY_IGNORE_IDX


class StreamDecoder:
    """Decodes tokens one by one and returns only complete characters.

    A character may span several tokens; :meth:`put` returns an empty string until the last one arrives. Only a few
    recent tokens are decoded again, so the cost per token is constant.

    Args:
        tokenizer: has ``decode(token_ids)``.

    Example:
        >>> from torchtune.tokenizers import StreamDecoder
        >>> decoder = StreamDecoder(tokenizer)
        >>> "".join([*map(decoder.put, tokenizer.encode("the cat", add_eos=False)), decoder.end()])
        'the cat'
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._context: list[int] = []  # complete text; some tokens decode differently after other tokens
        self._pending: list[int] = []

    def put(self, token: int) -> str:
        """Return the text that ``token`` completes; may be empty."""
        self._pending.append(token)
        before = self.tokenizer.decode(self._context)
        after = self.tokenizer.decode(self._context + self._pending)
        if after.endswith("\ufffd"):
            return ""
        self._context, self._pending = (self._context + self._pending)[-8:], []
        return self._added(before, after)

    def end(self) -> str:
        """Return the remaining text; an incomplete character becomes the replacement character."""
        before = self.tokenizer.decode(self._context)
        after = self.tokenizer.decode(self._context + self._pending)
        self._context, self._pending = [], []
        return self._added(before, after)

    @staticmethod
    def _added(before: str, after: str) -> str:
        return after[len(before) :]


def document_texts(row: Any) -> list[tuple[str, np.ndarray, np.ndarray]]:
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


def decode_around(
    token_ids: Iterable[int], special_texts: Mapping[int, str], decode: Callable[[list[int]], str], *, skip: bool
) -> str:
    """Decode the ids between special tokens with ``decode``; ``skip`` omits the special tokens."""
    texts: list[str] = []
    plain: list[int] = []
    for token_id in token_ids:
        if token_id not in special_texts:
            plain.append(token_id)
            continue
        if plain:
            texts.append(decode(plain))
            plain = []
        if not skip:
            texts.append(special_texts[token_id])
    return "".join([*texts, decode(plain)] if plain else texts)
