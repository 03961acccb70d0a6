"""Marks around the texts of turns, which locate these texts in a rendered chat template."""

import re
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple

Turn = Mapping[str, Any]
Span = tuple[int, int]

# Letters and digits only, which templates and JSON leave unchanged; random, so no text contains them.
_KEY = f"m{uuid.uuid4().hex[:16]}"
_MARK = re.compile(rf"{_KEY}(\d+)([oc])q")
_TEXTS = ("content", "reasoning_content", "thinking", "reasoning")
_OPENING_TAGS = re.compile(r"\s*(?:</?\w+>\s*)*")
_CLOSING_TAGS = 4  # maximum number of closing tags
_LAST_TAG = re.compile(r"</?\w{1,40}>\Z")


class Rendered(NamedTuple):
    """A rendered conversation without its marks, and the spans that they enclosed."""

    text: str
    places: dict[int, Span]  # number of the marked text -> (start, end)


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

    def _wrap(self, text: str, edges: Span | None = None) -> str:
        start, end = edges or (len(text) - len(text.lstrip()), len(text.rstrip()))
        if start >= end:
            return text
        self.count += 1
        return text[:start] + marked_text(text[start:end], self.count) + text[end:]

    def _text(self, text: str, role: str) -> str:
        if role != "assistant":
            return self._wrap(text, inner_span(text))
        marked = "</think>".join(map(self._wrap, text.split("</think>")))
        return self._wrap(text) if marked == text else marked

    def _nested(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._wrap(value)
        if isinstance(value, Mapping):
            return {key: self._nested(item) for key, item in value.items()}
        return [self._nested(item) for item in value] if isinstance(value, list | tuple) else value

    def turn(self, turn: Turn) -> tuple[Turn, list[int]]:
        """Return a turn with marks around its texts, and the mark numbers of its tool calls' function names."""
        marked, names = dict(turn), []
        for field in _TEXTS:
            if isinstance(turn.get(field), str):
                marked[field] = self._text(turn[field], turn["role"])
        calls = turn.get("tool_calls")
        if isinstance(calls, list):
            marked["tool_calls"] = []
            for call in calls:
                function = call.get("function", call) if isinstance(call, Mapping) else None
                if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                    function = {**function, "name": self._wrap(function["name"])}
                    names += [self.count] if function["name"].strip() else []
                    function["arguments"] = self._nested(function.get("arguments"))
                    call = {**call, "function": function} if "function" in call else function
                marked["tool_calls"].append(call)
        return marked, names


def marked_text(text: str, number: int) -> str:
    """Enclose ``text`` in the marks of a number."""
    return f"{_KEY}{number}oq{text}{_KEY}{number}cq"
