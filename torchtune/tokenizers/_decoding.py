"""Decoding of token ids: one token at a time, and in pieces by whether they are trained on."""

import inspect
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from torchtune.data import CROSS_ENTROPY_IGNORE_IDX

# Tokens before the next one that are decoded again, because some tokens decode differently after others.
_CONTEXT_LENGTH = 8


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
        self._context: list[int] = []  # the last tokens of complete text
        self._pending: list[int] = []  # tokens of an incomplete character

    def put(self, token: int) -> str:
        """Return the text that ``token`` completes; may be empty."""
        self._pending.append(token)
        text = self._decode_pending()
        if text.endswith("\ufffd"):  # an incomplete character
            return ""
        self._context = (self._context + self._pending)[-_CONTEXT_LENGTH:]
        self._pending = []
        return text

    def end(self) -> str:
        """Return the remaining text; an incomplete character becomes the replacement character."""
        text = self._decode_pending()
        self._context = []
        self._pending = []
        return text

    def _decode_pending(self) -> str:
        """Return the text of the pending tokens, as it is behind the tokens before them."""
        context = self.tokenizer.decode(self._context)
        return self.tokenizer.decode(self._context + self._pending)[len(context) :]


def document_texts(row: Any) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Return (title, tokens, labels) of each text in a row: both answers of a pair, or the first document of a pack.

    A query with passages or candidates has a text for each. The title is empty if a row has only one text, unless the
    text is an answer with a label.

    The labels of prompts for generation are placeholders; they are replaced by the ignore index. For rows of other
    kinds, the list is empty.
    """
    if isinstance(row, list):
        row = row[0]
    if not isinstance(row, Mapping):
        return []
    if "chosen_input_ids" in row:
        texts = []
        for side in ("chosen", "rejected"):
            tokens = np.asarray(row[f"{side}_input_ids"])
            labels = np.asarray(row[f"{side}_labels"])
            texts.append((side, tokens, labels))
        return texts
    retrieval_texts: list[tuple[str, Any]] = []  # (title, tokens)
    if {"query", "positive", "negatives"} <= row.keys():
        retrieval_texts = [("query", row["query"]), ("positive", row["positive"])]
        retrieval_texts += [("negative", negative) for negative in row["negatives"]]
    elif "documents" in row:  # candidates of a reranker
        for ids, target in zip(row["documents"], row["targets"], strict=True):
            retrieval_texts.append((f"candidate with label {target:g}", ids))
    if retrieval_texts:
        texts = []
        for title, ids in retrieval_texts:
            labels = [*ids[1:], CROSS_ENTROPY_IGNORE_IDX]  # all tokens are trained on
            texts.append((title, np.asarray(ids), np.asarray(labels)))
        return texts
    if "tokens" not in row or "labels" not in row:
        return []
    title = ""
    if "is_chosen" in row:
        title = "labeled bad"
        if row["is_chosen"]:
            title = "labeled good"
    labels = np.asarray(row["labels"])
    if "number" in row:  # a prompt for generation
        labels = np.full(len(row["tokens"]), CROSS_ENTROPY_IGNORE_IDX)
    return [(title, np.asarray(row["tokens"]), labels)]


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
    parameters = inspect.signature(tokenizer.decode).parameters
    options = {name: False for name in ("skip_special_tokens", "truncate_at_eos") if name in parameters}
    trained = is_trained(labels)
    changes = np.flatnonzero(np.diff(trained)) + 1
    pieces = []
    for start, end in pairwise([0, *changes.tolist(), len(tokens)]):
        if end > start:
            text = tokenizer.decode(tokens[start:end].tolist(), **options)
            pieces.append((text, bool(trained[start])))
    return pieces
