"""Encoding of control tokens that occur in data as plain text."""

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
from torchtune.tokenizers._byte_level_bpe import Tokens, WordEncoder
from torchtune.utils import get_logger, log_once

# Letters and digits, which templates, JSON and regular expressions leave unchanged; random, so no text contains it.
_KEY = f"q{uuid.uuid4().hex}"
_STAND_IN = re.compile(rf"{_KEY}n(\d+)q")


class TextGuard:
    """Replaces control tokens in the data's texts by placeholders, so that only the layout's tokens are parsed.

    Args:
        control: texts of control tokens.
    """

    def __init__(self, control: Iterable[str]) -> None:
        self.control = sorted((text for text in control if text), key=len, reverse=True)
        self._number = {text: i for i, text in enumerate(self.control)}
        self._spelled = re.compile("|".join(map(re.escape, self.control))) if self.control else None
        self._shortest = len(self.control[-1]) if self.control else 0

    def hide(self, value: Any) -> Any:
        """Return a string or nested plain data with placeholders for control tokens, in keys too."""
        if isinstance(value, str):
            if self._spelled is None or len(value) < self._shortest:
                return value
            return self._spelled.sub(self._stand_in, value)
        if type(value) is dict or isinstance(value, Mapping):  # dict: fast path
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.hide(item) for item in value]
        return value

    def _stand_in(self, match: re.Match[str]) -> str:
        log_once(
            get_logger(),
            f"A text of the data spells '{match[0]}': it is read as text. Where the control token is meant, set the "
            "tokenizer's parse_special_tokens to True.",
        )
        return f"{_KEY}n{self._number[match[0]]}q"

    def hide_message(self, message: Message) -> Message:
        """Return a copy of a turn with placeholders in its texts."""
        hidden = copy(message)
        hidden.content = [
            {**item, "content": self.hide(item["content"])} if item["type"] == "text" else item
            for item in message.content
        ]
        hidden.extra = self.hide(message.extra)
        return hidden

    def show(self, text: str) -> str:
        """Replace the placeholders in ``text`` by their control tokens."""
        return _STAND_IN.sub(lambda match: self.control[int(match[1])], text) if _KEY in text else text


class GuardedEncoder:
    """Encodes texts with placeholders: control tokens become their ids, placeholders are encoded as plain text.

    Texts with placeholders are encoded with a copy of the tokenizer, in which the control tokens have other names and
    the same ids.

    Args:
        tokenizer: a ``tokenizers.Tokenizer``.
        guard: guard made from the control tokens of ``tokenizer``.
    """

    def __init__(self, tokenizer: Tokenizer, guard: TextGuard) -> None:
        self.tokenizer = tokenizer
        self.guard = guard
        self._renamed: Tokenizer | None = None
        self._words: WordEncoder | None = None

    def fingerprint_parts(self) -> list[Any]:
        """Return the values that determine the ids."""
        return [self.tokenizer, self.guard.control]

    def encode_masked(self, text: str, spans: Sequence[tuple[int, int]]) -> Tokens:
        """Return ids and mask; a token is masked unless it covers a character of ``spans`` (sorted)."""
        if self._words is None:
            self._words = WordEncoder(self.tokenizer)
        found = self._words.encode(text, list(spans)) if _KEY not in text else None
        if found is None:
            encoding, moved = self.encode(text, spans)
            found = array("i", encoding.ids), _mask(encoding.offsets, moved)
        return found

    def encode(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[Encoding, list[tuple[int, int]]]:
        """Encode ``text``.

        Returns:
            the encoding, and ``spans`` (start, end in characters of ``text``) as offsets into the encoded string.
        """
        if _KEY not in text:
            return self.tokenizer.encode(text, add_special_tokens=False), list(spans)
        if self._renamed is None:
            self._renamed = _rename(self.tokenizer, self.guard.control)
        pieces, marks, length, position = [], [(0, 0, 0)], 0, 0
        control = "|".join(map(re.escape, self.guard.control))
        for match in re.finditer(rf"{_STAND_IN.pattern}|{control}", text):
            shown = self.guard.show(match[0])
            piece = shown if match[1] is not None else _new_name(self.guard.control.index(shown))
            pieces += [text[position : match.start()], piece]
            length += match.start() - position
            marks += [(match.start(), length, 1), (match.end(), length + len(piece), 0)]
            length, position = length + len(piece), match.end()
        encoded = "".join([*pieces, text[position:]])
        starts = [mark[0] for mark in marks]

        def moved(place: int, *, is_end: bool) -> int:
            i = bisect_right(starts, place) - 1
            before, after, is_replaced = marks[i]
            if is_replaced and place > before:  # inside a replaced part
                return marks[i + 1][1] if is_end else after
            return after + place - before

        return (
            self._renamed.encode(encoded, add_special_tokens=False),
            [(moved(start, is_end=False), moved(end, is_end=True)) for start, end in spans],
        )


def _mask(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> bytearray:
    """Return 1 for each token that covers no character of a span. Spans are sorted and disjoint."""
    mask = bytearray(b"\1") * len(offsets)
    current = iter(spans)
    start, end = next(current, (0, -1))
    for i, (first, last) in enumerate(offsets):
        while end >= 0 and first >= end:
            start, end = next(current, (0, -1))
        if end < 0:
            break
        if last > start or (first == last == start):
            mask[i] = False
    return mask


def _new_name(number: int) -> str:
    return f"{_KEY}c{number}q"


def _rename(tokenizer: Tokenizer, control: Sequence[str]) -> Tokenizer:
    """Return a copy of the tokenizer with renamed control tokens; the ids stay the same."""
    names = {text: _new_name(i) for i, text in enumerate(control)}
    content = json.loads(tokenizer.to_str())
    content["post_processor"] = None  # unused, and may refer to control tokens
    for token in content["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = content["model"]
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(text, text): token_id for text, token_id in vocab.items()}
    else:
        model["vocab"] = [[names.get(text, text), score] for text, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return Tokenizer.from_str(json.dumps(content))
