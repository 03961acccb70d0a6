"""Marks around the texts of turns, which locate these texts in a rendered chat template."""

import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Turn = Mapping[str, Any]
Span = tuple[int, int]

# Letters and digits only, which templates and JSON leave unchanged; random, so no text contains them.
_KEY = f"m{uuid.uuid4().hex[:16]}"
_MARK = re.compile(rf"{_KEY}(\d+)([oc])q")
_REASONING = ("reasoning_content", "thinking", "reasoning")
_OPENING_TAGS = re.compile(r"\s*(?:</?\w+>\s*)*")
_CLOSING_TAGS = 4  # maximum number of closing tags
_LAST_TAG = re.compile(r"</?\w{1,40}>\Z")


class Rendered(NamedTuple):
    """A rendered conversation without its marks, and the spans that they enclosed."""

    text: str
    places: dict[int, Span]  # number of the marked text -> (start, end)


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


def read_marks(marked: str) -> Rendered:
    """Remove the marks from a text and return the span of each marked text's first occurrence."""
    pieces, places, length, position = [], {}, 0, 0
    closed = set()
    for match in _MARK.finditer(marked):
        pieces.append(marked[position : match.start()])
        length += match.start() - position
        position, number = match.end(), int(match[1])
        if number not in places:
            places[number] = (length, length)
        elif match[2] == "c" and number not in closed:
            places[number] = (places[number][0], length)
        if match[2] == "c":
            closed.add(number)
    pieces.append(marked[position:])
    return Rendered("".join(pieces), places)


def inner_span(text: str) -> Span:
    """Return the span of a text without outer white space and tags, which a template may strip or search for."""
    start, end = _OPENING_TAGS.match(text).end(), len(text.rstrip())
    for _ in range(_CLOSING_TAGS):
        tag = _LAST_TAG.search(text, max(start, end - 43), end)
        if tag is None:
            break
        end = start + len(text[start : tag.start()].rstrip())
    return start, end


class Marker:
    """Adds numbered marks around the texts of turns."""

    def __init__(self) -> None:
        self.count = 0
        self.texts = [""]  # marked text by number, from 1 on

    def _wrap(self, text: str, edges: Span | None = None) -> str:
        start, end = edges or (len(text) - len(text.lstrip()), len(text.rstrip()))
        if start >= end:
            return text
        self.count += 1
        self.texts.append(text[start:end])
        return text[:start] + marked_text(text[start:end], self.count) + text[end:]

    def _numbered(self, text: str, edges: Span | None = None) -> tuple[str, list[int]]:
        """Return a text with marks, and its number; no number for white space."""
        before = self.count
        return self._wrap(text, edges), list(range(before + 1, self.count + 1))

    def _answer(self, text: str) -> tuple[str, list[int], list[int]]:
        """Return an assistant's text with marks, the numbers of the answer, and those of the reasoning before it."""
        *thoughts, answer = text.split("</think>")
        reasoning: list[int] = []
        marked: list[str] = []
        for thought in thoughts:
            wrapped, numbers = self._numbered(thought)
            marked.append(wrapped)
            first, last = inner_span(thought)
            if first < last:  # more than an opening tag
                reasoning += numbers
        wrapped, numbers = self._numbered(answer)
        joined = "</think>".join([*marked, wrapped])
        return (*self._numbered(text), []) if joined == text else (joined, numbers, reasoning)

    def _nested(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._wrap(value)
        if isinstance(value, Mapping):
            return {key: self._nested(item) for key, item in value.items()}
        return [self._nested(item) for item in value] if isinstance(value, list | tuple) else value

    def _parts(self, content: Sequence[Any]) -> tuple[list[Any], list[int]]:
        """Return the parts of a turn with marks around their texts, and the numbers of these texts."""
        parts: list[Any] = []
        numbers: list[int] = []
        for part in content:
            if isinstance(part, Mapping) and isinstance(part.get("text"), str):
                marked, number = self._numbered(part["text"])
                part = {**part, "text": marked}
                numbers += number
            parts.append(part)
        return parts, numbers

    def turn(self, turn: Turn) -> MarkedTurn:
        """Add marks to the texts of a turn."""
        marked = dict(turn)
        text: list[int] = []
        reasoning: list[int] = []
        calls: list[int] = []
        content = turn.get("content")
        if isinstance(content, str) and turn["role"] == "assistant":
            marked["content"], text, reasoning = self._answer(content)
        elif isinstance(content, str):
            marked["content"], text = self._numbered(content, inner_span(content))
        elif isinstance(content, list | tuple):
            marked["content"], text = self._parts(content)
        for field in _REASONING:
            if isinstance(turn.get(field), str):
                marked[field], numbers = self._numbered(turn[field])
                reasoning += numbers
        if isinstance(turn.get("tool_calls"), list):
            marked["tool_calls"] = []
            for call in turn["tool_calls"]:
                function = call.get("function", call) if isinstance(call, Mapping) else None
                if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                    name, numbers = self._numbered(function["name"])
                    calls += numbers
                    function = {**function, "name": name, "arguments": self._nested(function.get("arguments"))}
                    call = {**call, "function": function} if "function" in call else function
                marked["tool_calls"].append(call)
        return MarkedTurn(marked, calls, text, reasoning)


def marked_text(text: str, number: int) -> str:
    """Enclose ``text`` in the marks of a number."""
    return f"{_KEY}{number}oq{text}{_KEY}{number}cq"
