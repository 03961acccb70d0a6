"""Control tokens that occur in data as plain text, and their encoding as text."""

import json
import re
import uuid
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import Any

from tokenizers import Encoding, Tokenizer

from torchtune.data import Message
from torchtune.tokenizers._byte_level_bpe import TokensAndMask, WordEncoder
from torchtune.tokenizers._protocols import any_text_pattern
from torchtune.utils import get_logger, log_once

# Letters and digits, which templates, JSON and regular expressions leave unchanged; random, so no text contains it.
_KEY = f"q{uuid.uuid4().hex}"
_PLACEHOLDER = re.compile(rf"{_KEY}n(\d+)q")


class ControlTokens:
    """Replaces control tokens in the data's texts by placeholders, so that only the layout's tokens are parsed.

    Args:
        texts: texts of the control tokens.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        # Sorted, because the order is part of the tokenizer's fingerprint.
        self.texts = sorted((text for text in texts if text), key=len, reverse=True)
        self._number = {text: i for i, text in enumerate(self.texts)}
        self._pattern: re.Pattern[str] | None = None
        self._shortest_length = 0
        if self.texts:
            self._pattern = re.compile(any_text_pattern(self.texts))
            self._shortest_length = len(self.texts[-1])

    def hide(self, value: Any) -> Any:
        """Return a string or nested plain data with placeholders for control tokens, in keys too."""
        if isinstance(value, str):
            if self._pattern is None or len(value) < self._shortest_length:
                return value
            return self._pattern.sub(self._placeholder, value)
        if type(value) is dict or isinstance(value, Mapping):  # dict: fast path
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.hide(item) for item in value]
        return value

    def _placeholder(self, token: re.Match[str]) -> str:
        """Return the placeholder of a control token in a text, and say once that it is read as text."""
        log_once(
            get_logger(),
            f"A text of the data spells '{token[0]}': it is read as text. Where the control token is meant, set the "
            "tokenizer's parse_special_tokens to True.",
        )
        return f"{_KEY}n{self._number[token[0]]}q"

    def hide_message(self, message: Message) -> Message:
        """Return a copy of a turn with placeholders in its texts."""
        content = []
        for item in message.content:
            if item["type"] == "text":
                item = {**item, "content": self.hide(item["content"])}
            content.append(item)
        hidden = copy(message)
        hidden.content = content
        hidden.extra = self.hide(message.extra)
        return hidden

    def restore(self, text: str) -> str:
        """Replace the placeholders in ``text`` by their control tokens."""
        if _KEY not in text:
            return text
        return _PLACEHOLDER.sub(lambda placeholder: self.texts[int(placeholder[1])], text)


class ControlTokenEncoder:
    """Encodes texts with placeholders: control tokens become their ids, placeholders are encoded as plain text.

    Texts with placeholders are encoded with a copy of the tokenizer, in which the control tokens have other names and
    the same ids.

    Args:
        tokenizer: a ``tokenizers.Tokenizer``.
        control_tokens: the control tokens of ``tokenizer``.
    """

    def __init__(self, tokenizer: Tokenizer, control_tokens: ControlTokens) -> None:
        self.tokenizer = tokenizer
        self.control_tokens = control_tokens
        self._renamed_tokenizer: Tokenizer | None = None
        self._word_encoder: WordEncoder | None = None

    def fingerprint_parts(self) -> list[Any]:
        """Return the values that determine the ids."""
        return [self.tokenizer, self.control_tokens.texts]

    def encode_masked(self, text: str, spans: Sequence[tuple[int, int]]) -> TokensAndMask:
        """Return ids and mask; a token is masked unless it covers a character of ``spans`` (sorted)."""
        if self._word_encoder is None:
            self._word_encoder = WordEncoder(self.tokenizer)
        if _KEY not in text:
            tokens_and_mask = self._word_encoder.encode(text, list(spans))
            if tokens_and_mask is not None:
                return tokens_and_mask
        encoding, encoded_spans = self.encode(text, spans)
        return array("i", encoding.ids), _mask(encoding.offsets, encoded_spans)

    def encode(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[Encoding, list[tuple[int, int]]]:
        """Encode ``text``.

        Returns:
            the encoding, and ``spans`` (start, end in characters of ``text``) as offsets into the encoded string.
        """
        if _KEY not in text:
            return self.tokenizer.encode(text, add_special_tokens=False), list(spans)
        if self._renamed_tokenizer is None:
            self._renamed_tokenizer = _rename_tokens(self.tokenizer, self.control_tokens.texts)
        new_text, starts, new_starts = self._rename_in_text(text)

        def new_position(position: int) -> int:
            # An edge of a span lies within an unchanged piece, or where a piece begins: never inside a placeholder.
            index = bisect_right(starts, position) - 1
            return new_starts[index] + position - starts[index]

        new_spans = [(new_position(start), new_position(end)) for start, end in spans]
        return self._renamed_tokenizer.encode(new_text, add_special_tokens=False), new_spans

    def _rename_in_text(self, text: str) -> tuple[str, list[int], list[int]]:
        """Replace control tokens by their names in the renamed tokenizer, and placeholders by their control tokens.

        Returns:
            the new text, and the start of each piece, replaced or unchanged, in ``text`` and in the new text.
        """
        texts = self.control_tokens.texts
        any_token = any_text_pattern(texts)
        pieces: list[str] = []
        starts = [0]
        new_starts = [0]
        position = 0
        new_position = 0
        for match in re.finditer(rf"{_PLACEHOLDER.pattern}|{any_token}", text):
            if match[1] is not None:  # a placeholder
                new_piece = texts[int(match[1])]
            else:
                new_piece = _new_name(texts.index(match[0]))
            unchanged = text[position : match.start()]
            pieces += [unchanged, new_piece]
            position = match.end()
            new_position += len(unchanged)
            starts += [match.start(), match.end()]
            new_starts += [new_position, new_position + len(new_piece)]
            new_position += len(new_piece)
        pieces.append(text[position:])
        return "".join(pieces), starts, new_starts


def _mask(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> bytearray:
    """Return 1 for each token that covers no character of a span. Spans are sorted and disjoint."""
    mask = bytearray(b"\1") * len(offsets)
    remaining_spans = iter(spans)
    no_span = (0, -1)
    start, end = next(remaining_spans, no_span)
    for i, (first, last) in enumerate(offsets):
        while end >= 0 and first >= end:
            start, end = next(remaining_spans, no_span)
        if end < 0:
            break
        is_empty = first == last == start  # a token without characters, at the beginning of the span
        if last > start or is_empty:
            mask[i] = False
    return mask


def _new_name(number: int) -> str:
    """Return the name of a control token in the renamed tokenizer."""
    return f"{_KEY}c{number}q"


def _rename_tokens(tokenizer: Tokenizer, control_tokens: Sequence[str]) -> Tokenizer:
    """Return a copy of the tokenizer with renamed control tokens, so that text with their former names is plain text.

    The ids stay the same.
    """
    names = {text: _new_name(number) for number, text in enumerate(control_tokens)}
    content = json.loads(tokenizer.to_str())
    content["post_processor"] = None  # unused, and may refer to control tokens
    for token in content["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = content["model"]
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        for text, name in names.items():
            if text in vocab:
                vocab[name] = vocab.pop(text)
    else:  # a Unigram model: the id of a piece is its position
        for piece in vocab:
            piece[0] = names.get(piece[0], piece[0])
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return Tokenizer.from_str(json.dumps(content))
