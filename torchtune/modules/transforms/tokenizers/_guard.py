"""Text that spells a control token is encoded as text."""

import json
import re
import uuid
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import Encoding, Tokenizer

from torchtune.data import Message
from torchtune.modules.transforms.tokenizers._words import Tokens, WordEncoder
from torchtune.utils import get_logger, log_once

# Letters and digits only: templates, JSON and regular expressions leave them as they are; no text has them by chance.
_KEY = f"q{uuid.uuid4().hex}"
_STAND_IN = re.compile(rf"{_KEY}n(\d+)q")


class TextGuard:
    """Puts stand-ins for the control tokens that a turn's text spells, until the layout's own have been found.

    Args:
        control: texts of control tokens.
    """

    def __init__(self, control: Iterable[str]) -> None:
        self.control = sorted((text for text in control if text), key=len, reverse=True)
        self._number = {text: i for i, text in enumerate(self.control)}
        self._spelled = re.compile("|".join(map(re.escape, self.control))) if self.control else None
        self._shortest = len(self.control[-1]) if self.control else 0

    def hide(self, value: Any) -> Any:
        """A text, or nested plain data, with stand-ins for control tokens in every text, keys included."""
        if isinstance(value, str):
            if self._spelled is None or len(value) < self._shortest:
                return value
            return self._spelled.sub(self._stand_in, value)
        if type(value) is dict or isinstance(value, Mapping):  # the first is faster, and what most are
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
        """A copy of a turn with stand-ins in its texts."""
        content = [
            {**item, "content": self.hide(item["content"])} if item["type"] == "text" else item
            for item in message.content
        ]
        return Message(
            role=message.role,
            content=content,
            masked=message.masked,
            ipython=message.ipython,
            eot=message.eot,
            extra=self.hide(message.extra),
        )

    def show(self, text: str) -> str:
        """``text`` with what the stand-ins stand for."""
        return _STAND_IN.sub(lambda match: self.control[int(match[1])], text) if _KEY in text else text


class GuardedEncoder:
    """Encodes texts with stand-ins: control tokens outside them become their ids, those behind them are plain text.

    That is what the tokenizer would make of the texts if it had no control tokens of these names: it is read a second
    time with names that no text spells.

    Args:
        tokenizer: any of the ``tokenizers`` package.
        guard: made of all control tokens of ``tokenizer``.
    """

    def __init__(self, tokenizer: Tokenizer, guard: TextGuard) -> None:
        self.tokenizer = tokenizer
        self.guard = guard
        self._renamed: Tokenizer | None = None
        self._words: WordEncoder | None = None

    def fingerprint_parts(self) -> list[Any]:
        """What the ids depend on."""
        return [self.tokenizer, self.guard.control]

    def encode_masked(self, text: str, spans: Sequence[tuple[int, int]]) -> Tokens:
        """Ids, and for each whether it is masked: it is unless it covers a character of ``spans`` (in order)."""
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
            the encoding, and ``spans`` (start, end in characters of ``text``) in characters of what was encoded.
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
            if is_replaced and place > before:  # inside what was replaced as a whole
                return marks[i + 1][1] if is_end else after
            return after + place - before

        return (
            self._renamed.encode(encoded, add_special_tokens=False),
            [(moved(start, is_end=False), moved(end, is_end=True)) for start, end in spans],
        )


def _mask(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> bytearray:
    """Whether each token is masked: 1 unless it covers a character of a span. Spans are in order and apart."""
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
    """The tokenizer with other names for its control tokens, and the same ids."""
    names = {text: _new_name(i) for i, text in enumerate(control)}
    content = json.loads(tokenizer.to_str())
    content["post_processor"] = None  # is not used, and may name control tokens
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
