"""Marks around the texts of turns, which show where a chat template writes each text."""

import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torchtune.data import REASONING_FIELDS

Turn = Mapping[str, Any]
Span = tuple[int, int]

# Letters and digits only, which templates and JSON leave unchanged; random, so no text contains them.
_KEY = f"m{uuid.uuid4().hex[:16]}"
_MARK = re.compile(rf"{_KEY}(\d+)([oc])q")
_OPENING_TAGS = re.compile(r"\s*(?:</?\w+>\s*)*")
_MAX_CLOSING_TAGS = 4
_CLOSING_TAG = re.compile(r"</?\w{1,40}>\Z")
_MAX_TAG_LENGTH = 43


class Rendering(NamedTuple):
    """A rendered conversation without its marks, and the spans that they enclosed."""

    text: str
    spans: dict[int, Span]  # by number of the marked text


class MarkedTurn(NamedTuple):
    """A turn with marks around its texts, and the numbers of these texts.

    Attributes:
        turn: the turn with marks.
        calls: numbers of the function names of its tool calls.
        text: numbers of its text, without reasoning.
        reasoning: numbers of its reasoning, in fields of its own and before ``</think>`` in the text.
    """

    turn: Turn
    calls: list[int]
    text: list[int]
    reasoning: list[int]


def marked_text(text: str, number: int) -> str:
    """Enclose ``text`` in the marks of a number."""
    return f"{_KEY}{number}oq{text}{_KEY}{number}cq"


def read_marks(marked: str) -> Rendering:
    """Remove the marks from a text and return the span of each marked text's first occurrence.

    A template may write a text twice, or only its beginning or end: a mark without its counterpart has an empty span.
    """
    pieces: list[str] = []
    spans: dict[int, Span] = {}
    closed: set[int] = set()
    length = 0
    position = 0
    for mark in _MARK.finditer(marked):
        pieces.append(marked[position : mark.start()])
        length += mark.start() - position
        position = mark.end()
        number = int(mark[1])
        is_closing = mark[2] == "c"
        if number not in spans:  # until it is closed, the span ends where it starts
            spans[number] = (length, length)
        elif is_closing and number not in closed:
            spans[number] = (spans[number][0], length)
        if is_closing:
            closed.add(number)
    pieces.append(marked[position:])
    return Rendering("".join(pieces), spans)


def inner_span(text: str) -> Span:
    """Return the span of a text without outer white space and tags, which a template may strip or search for."""
    start = _OPENING_TAGS.match(text).end()
    end = len(text.rstrip())
    for _ in range(_MAX_CLOSING_TAGS):
        tag = _CLOSING_TAG.search(text, max(start, end - _MAX_TAG_LENGTH), end)
        if tag is None:
            break
        end = start + len(text[start : tag.start()].rstrip())
    return start, end


class Marker:
    """Adds numbered marks around the texts of turns."""

    def __init__(self) -> None:
        self.count = 0
        self.texts = [""]  # marked text by number, from 1 on

    def _mark(self, text: str, span: Span | None = None) -> str:
        """Add marks around a span of ``text``, by default without outer white space; add none around nothing."""
        if span is None:
            span = (len(text) - len(text.lstrip()), len(text.rstrip()))
        start, end = span
        if start >= end:
            return text
        self.count += 1
        self.texts.append(text[start:end])
        return text[:start] + marked_text(text[start:end], self.count) + text[end:]

    def _numbered(self, text: str, span: Span | None = None) -> tuple[str, list[int]]:
        """Return a text with marks, and its number; no number for white space."""
        previous_count = self.count
        return self._mark(text, span), list(range(previous_count + 1, self.count + 1))

    def _answer(self, text: str) -> tuple[str, list[int], list[int]]:
        """Return an assistant's text with marks, the numbers of the answer, and those of the reasoning before it."""
        *thoughts, answer = text.split("</think>")
        reasoning: list[int] = []
        pieces: list[str] = []
        for thought in thoughts:
            piece, numbers = self._numbered(thought)
            pieces.append(piece)
            start, end = inner_span(thought)
            if start < end:  # more than an opening tag
                reasoning += numbers
        piece, answer_numbers = self._numbered(answer)
        marked = "</think>".join([*pieces, piece])
        if marked == text:  # nothing but white space
            marked, answer_numbers = self._numbered(text)
            return marked, answer_numbers, []
        return marked, answer_numbers, reasoning

    def _nested(self, value: Any) -> Any:
        """Return plain data with marks around its texts, whose numbers nobody asks for."""
        if isinstance(value, str):
            return self._mark(value)
        if isinstance(value, Mapping):
            return {key: self._nested(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._nested(item) for item in value]
        return value

    def _parts(self, content: Sequence[Any]) -> tuple[list[Any], list[int]]:
        """Return the parts of a turn with marks around their texts, and the numbers of these texts."""
        parts: list[Any] = []
        numbers: list[int] = []
        for part in content:
            if isinstance(part, Mapping) and isinstance(part.get("text"), str):
                text, text_numbers = self._numbered(part["text"])
                part = {**part, "text": text}
                numbers += text_numbers
            parts.append(part)
        return parts, numbers

    def _call(self, call: Any) -> tuple[Any, list[int]]:
        """Return a tool call with marks around its name and arguments, and the number of its name."""
        function = None
        if isinstance(call, Mapping):
            function = call.get("function", call)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            return call, []
        name, numbers = self._numbered(function["name"])
        function = {**function, "name": name, "arguments": self._nested(function.get("arguments"))}
        if "function" in call:
            return {**call, "function": function}, numbers
        return function, numbers

    def turn(self, turn: Turn) -> MarkedTurn:
        """Add marks to the texts of a turn."""
        marked = dict(turn)
        text: list[int] = []
        reasoning: list[int] = []
        calls: list[int] = []
        content = turn.get("content")
        if isinstance(content, str) and turn["role"] == "assistant":
            marked["content"], text, reasoning = self._answer(content)
        elif isinstance(content, str):  # outer tags, which a template may search for, stay outside the marks
            marked["content"], text = self._numbered(content, inner_span(content))
        elif isinstance(content, list | tuple):
            marked["content"], text = self._parts(content)
        for field in REASONING_FIELDS:
            if isinstance(turn.get(field), str):
                marked[field], numbers = self._numbered(turn[field])
                reasoning += numbers
        if isinstance(turn.get("tool_calls"), list):
            marked["tool_calls"] = []
            for call in turn["tool_calls"]:
                marked_call, numbers = self._call(call)
                marked["tool_calls"].append(marked_call)
                calls += numbers
        return MarkedTurn(marked, calls, text, reasoning)
