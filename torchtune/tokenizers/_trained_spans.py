"""Positions of a conversation's turns in the text that a chat template renders.

A template is a program: it may strip texts, drop the reasoning of earlier turns, add a system prompt or move it into
another turn. Therefore the conversation is rendered a second time with marks around the texts of its turns, which
locate each text. The passages between turn texts are compared with two other renderings: the generation prompt before a
turn shows where the model's output starts, and the conversation that ends after the turn shows where it ends. Both are
rendered once per kind of passage, so that the cost is linear in the length of the conversation.
"""

import re
import uuid
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from torchtune.data import DataError

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


# (messages, add_generation_prompt) -> text
Render = Callable[[Sequence[Turn], bool], str]

_DIGIT = re.compile(r"\d")
_STAND_IN = "StandInText"
_USER = {"role": "user", "content": "Question"}
_ANSWER = {"role": "assistant", "content": _STAND_IN}
_OMITTED = {
    "system": "system text",
    "developer": "system text",
    "user": "text of user turns",
    "tool": "results of tools",
    "call": "text beside tool calls",
    "assistant": "text of assistant turns",
}
_CALL = {"type": "function", "id": "call00000", "function": {"name": "standInCall", "arguments": {"at": "it"}}}


def _common_prefix(one: str, other: str) -> int:
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def _whole_words(text: str) -> str:
    """Cut ``text`` after its last white space or closing bracket, because the rest may be part of a tag."""
    return re.fullmatch(r"((?:.*[\s>\]])?).*", text, re.S)[1]


class TurnFinder:
    """Locates the turns of one rendered conversation.

    Args:
        render: renders all or part of the conversation.
        messages: the conversation as the template's input.
        text: the rendered conversation.
        stops: special tokens that may end an assistant turn.
        special: all special tokens.
        first: special tokens that follow the text of an answer, while ``stops`` are not known yet.
    """

    def __init__(
        self,
        render: Render,
        messages: Sequence[Turn],
        text: str,
        stops: Sequence[str],
        special: Sequence[str] = (),
        first: Sequence[str] = (),
    ) -> None:
        self._render = render
        self.messages = list(messages)
        self.text = text
        self.stops, self.first = tuple(stops), (*stops, *first)
        longest = sorted({*special, *stops}, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest)) or "(?!)")
        self._starts: dict[Any, int] = {}
        self._ends: dict[Any, int] = {}
        marker = Marker()
        self._marked_turns: list[MarkedTurn] = []
        self._numbers: list[range] = []
        self._turn_of = [-1]
        for turn in self.messages:
            first = marker.count + 1
            self._marked_turns.append(marker.turn(turn))
            self._numbers.append(range(first, marker.count + 1))
            self._turn_of += [len(self._numbers) - 1] * len(self._numbers[-1])
        self._marked = [marked.turn for marked in self._marked_turns]
        self._texts = marker.texts

    @cached_property
    def _found(self) -> Rendered | None:
        """Rendering with marks; None if the marks change the text."""
        found = self._rendered(self._marked, False)
        return found if found is not None and found.text == self.text else None

    @property
    def _places(self) -> dict[int, Span]:
        return {} if self._found is None else self._found.places

    @property
    def _turns(self) -> list[Turn]:
        return self.messages if self._found is None else self._marked

    @cached_property
    def _order(self) -> list[int]:
        """Numbers of the marked texts, in the order of the rendered text."""
        return sorted(self._places, key=lambda number: (*self._places[number], number))

    @cached_property
    def _rank(self) -> dict[int, int]:
        return {number: i for i, number in enumerate(self._order)}

    def assistant(self, index: int) -> list[Span]:
        """Return the spans of turn ``index`` that the model generates.

        A span reaches from the end of the generation prompt to the end-of-turn token, without white space after the
        token. There are several spans if the template puts another turn inside this one, such as a tool's answer before
        the text that accompanies the call.

        Raises:
            DataError: the spans cannot be determined, or the template omits the turn, its text or one of its calls.
        """
        self.check_written(index)
        spans: list[Span] = []
        runs = self._runs(index) or [(None, None)]
        for first, last in runs:
            start = self._start(index) if not spans or first is None else self._places[first][0]
            goes_on = (first, last) != runs[-1] or self._is_followed_by_assistant(last)
            spans.append((start, self._end(index, start, last, goes_on=goes_on)))
        if all(start >= end for start, end in spans):
            raise DataError(
                f"the chat template writes nothing for turn {index} (assistant): take it out of the conversation, or "
                "use a template that writes it"
            )
        return spans

    def check_written(self, index: int) -> None:
        """Raise :class:`DataError` if the template omits the text of a turn without tool calls, or a tool call.

        A text beside a call is left to :meth:`omitted`: the call, which needs no text, is trained.
        """
        if self._found is None:
            return
        marked = self._marked_turns[index]
        written = [number in self._places for number in marked.calls]
        if not any(written) and marked.calls and not self._has_calls:
            raise DataError(
                f"the chat template has no tool calls, but turn {index} has {len(written)}: set the tokenizer's "
                "chat_template to one that writes them, write the calls into the turn's content, or leave the row out"
            )
        if not all(written):
            raise DataError(
                f"the chat template writes {sum(written)} of the {len(written)} tool_calls of turn {index}: divide "
                "the turn, or use a template that writes them"
            )
        if marked.text and not marked.calls and not self._is_written(marked.text):
            raise DataError(
                f"the chat template writes nothing of the text of turn {index} (assistant): take it out of the "
                "conversation, or use a template that writes it"
            )

    @property
    def _has_calls(self) -> bool:
        """Whether the template writes a tool call at all."""
        rendered = self._rendered([_USER, {"role": "assistant", "content": "", "tool_calls": [_CALL]}], False)
        return rendered is not None and _CALL["function"]["name"] in rendered.text

    def omitted(self, ignored: Collection[int] = ()) -> list[str]:
        """Return the kinds of texts that the template omits, as nouns for messages.

        Args:
            ignored: turns whose reasoning may be omitted.
        """
        kinds: list[str] = []
        for index, marked in enumerate(self._marked_turns):
            if marked.text and not self._is_written(marked.text):
                role = "call" if marked.calls else self.messages[index]["role"]
                kinds.append(_OMITTED.get(role, f"text of turns of '{role}'"))
            if marked.reasoning and index not in ignored and not self._is_written(marked.reasoning):
                kinds.append("reasoning")
        return kinds

    def _is_written(self, numbers: Sequence[int]) -> bool:
        """Return whether one of the marked texts is in the rendered text."""
        if self._found is None:  # the marks change the text: look for the text itself
            return any(self._texts[number] in self.text for number in numbers)
        return any(number in self._places for number in numbers)

    def other(self, index: int) -> Span:
        """Return the span of a user, system or tool turn's text, with its end-of-turn token.

        Raises:
            DataError: the span cannot be determined.
        """
        numbers = [number for number in self._numbers[index] if number in self._places]
        if not numbers:
            raise self._lost(index)
        start, end = self._places[numbers[0]][0], self._places[numbers[-1]][1]
        content = self.messages[index]["content"]
        first, last = inner_span(content)
        start -= _common_prefix(content[:first][::-1], self.text[max(0, start - first) : start][::-1])
        end += _common_prefix(content[last:], self.text[end : end + len(content) - last])
        return start, self._stop_after(end) or end

    def _lost(self, index: int) -> DataError:
        return DataError(
            f"cannot tell which part of the rendered conversation is turn {index} ({self.messages[index]['role']}): "
            "the chat template rearranges it; mark the assistant's part with {% generation %} in the template"
        )

    def _rendered(self, messages: Sequence[Turn], add_generation_prompt: bool) -> Rendered | None:
        """Render messages; None if the template rejects a conversation that ends here."""
        try:
            return read_marks(self._render(messages, add_generation_prompt))
        except DataError:
            return None

    def _runs(self, index: int) -> list[tuple[int, int]]:
        """Return (first, last) text number of each run of turn ``index`` without another turn's text in between."""
        runs: list[tuple[int, int]] = []
        for rank in sorted(self._rank[number] for number in self._numbers[index] if number in self._rank):
            number = self._order[rank]
            if runs and self._rank[runs[-1][1]] == rank - 1:
                runs[-1] = (runs[-1][0], number)
            else:
                runs.append((number, number))
        return runs

    def _is_followed_by_assistant(self, number: int | None) -> bool:
        """Return whether the next marked text after text ``number`` belongs to a turn of the assistant."""
        if number is None or self._rank[number] + 1 == len(self._order):
            return False
        following = self._turn_of[self._order[self._rank[number] + 1]]
        return self.messages[following]["role"] == "assistant"

    def _before(self, index: int) -> int | None:
        """Return the number of the last text before turn ``index`` that belongs to an earlier turn."""
        runs = self._runs(index)
        if not runs:
            return next((before[-1][1] for i in range(index - 1, -1, -1) if (before := self._runs(i))), None)
        rank = self._rank[runs[0][0]] - 1
        while rank >= 0 and self._turn_of[self._order[rank]] >= index:
            rank -= 1
        return self._order[rank] if rank >= 0 else None

    def _end_of(self, number: int | None) -> int:
        return 0 if number is None else self._places[number][1]

    def _limit(self, position: int, after: int | None) -> int:
        """Return where the next marked text begins: after text number ``after`` or, if it is None, after a position."""
        if after is not None:
            rank = self._rank[after] + 1
        else:
            rank = bisect_left(self._order, position, key=lambda number: self._places[number][0])
        return self._places[self._order[rank]][0] if rank < len(self._order) else len(self.text)

    def _key(self, passage: str, first_turn: int, index: int) -> Any:
        """Return a cache key that is equal for passages that differ only in digits and call ids."""
        turns = self.messages[first_turn : index + 2]
        for turn in turns:
            calls = turn.get("tool_calls")
            calls = calls if isinstance(calls, list) else []
            for name in (turn.get("tool_call_id"), *(call.get("id") for call in calls if isinstance(call, Mapping))):
                passage = passage.replace(name, "0" * len(name)) if name and isinstance(name, str) else passage
        return _DIGIT.sub("0", passage), tuple(turn["role"] for turn in turns), index - first_turn

    def _tail(self, rendered: Rendered | None, number: int | None) -> str | None:
        """Return the rest of another rendering after a marked text; None if the text is missing."""
        if rendered is None or (number is not None and number not in rendered.places):
            return None
        return rendered.text[0 if number is None else rendered.places[number][1] :]

    def _start(self, index: int) -> int:
        before = self._before(index)
        base = self._end_of(before)
        limit = self._limit(base, before)
        key = self._key(self.text[base:limit], 0 if before is None else self._turn_of[before], index)
        if key not in self._starts:
            self._starts[key] = self._find_start(index, before, base, limit) - base
        return base + self._starts[key]

    def _find_start(self, index: int, before: int | None, base: int, limit: int) -> int:
        if index and not self._runs(index - 1) and (start := self._find_after_blank(index)) is not None:
            return start
        prompt = self._tail(self._rendered(self._turns[:index], True), before)
        passage, header = self.text[base:limit], self._header
        if prompt is not None:
            shared = _common_prefix(prompt, self.text[base : base + len(prompt)])
            if shared == len(prompt):
                is_late = bool(header) and passage.startswith(header, shared)  # the prompt has no header
                return base + shared + len(header) * is_late
            if shared >= len(passage):
                return limit  # the generation prompt adds text, such as <think>, that a finished turn lacks
            start = len(_whole_words(passage[:shared]))  # or the prompt differs from the finished turn
            between = range(self._turn_of[before] + 1 if before is not None else 0, index)
            is_continued = header not in passage and all(self._runs(turn) for turn in between)
            if header and (header in passage[:start] or is_continued):
                return base + start
        start = passage.rfind(header) if header else -1
        if start < 0:
            raise self._lost(index)
        return base + start + len(header)

    def _find_after_blank(self, index: int) -> int | None:
        """Find the start of a turn after a turn without text, by rendering with a text inserted there."""
        turns = [*self._turns]
        turns[index - 1] = {**turns[index - 1], "content": marked_text("x", 0)}
        rest = self._tail(self._rendered(turns, False), 0)
        prompt = self._tail(self._rendered(turns[:index], True), 0)
        if rest is None or prompt is None or not (rest.startswith(prompt) and self.text.endswith(rest)):
            return None
        return len(self.text) - len(rest) + len(prompt)

    @cached_property
    def _header(self) -> str:
        """The assistant's header: the part of the generation prompt that finished turns share."""
        user, *more = (Marker().turn(turn).turn for turn in (_USER, _ANSWER, _USER, _ANSWER))
        opened, closed = (self._tail(self._rendered([user], prompt), 1) for prompt in (True, False))
        if opened is None or closed is None or not opened.startswith(closed):
            return ""
        header = opened[len(closed) :]
        for turns in ([user, more[0]], [user, *more]):
            finished = self._tail(self._rendered(turns, False), 1)
            if finished is not None and finished.startswith(closed):
                shared = _common_prefix(header, finished[len(closed) :])
                header = header if shared == len(header) else _whole_words(header[:shared])
        return header

    def _end(self, index: int, start: int, last: int | None, *, goes_on: bool) -> int:
        base = self._end_of(last)
        if last is None or base < start:
            last, base = None, start
        passage = self.text[base : self._limit(base, last)]
        key = (*self._key(passage, index, index), last is None, goes_on)
        if key not in self._ends:
            self._ends[key] = self._find_end(index, last, start, passage, goes_on=goes_on)
        return base + self._ends[key]

    def _find_end(self, index: int, last: int | None, start: int, tail: str, *, goes_on: bool) -> int:
        """Return the number of characters of ``tail``, the text after a turn's last text, that the model generates."""
        is_last = index == len(self.messages) - 1
        found = [*self._special.finditer(tail)]
        if is_last and len(found) < 2:
            return found[0].end() if found else len(tail)
        others = self._followed(index) if is_last else iter([self._turns[: index + 1]])
        for messages in others:
            other = self._rendered(messages, False)
            if last is not None:
                rest = self._tail(other, last)
            else:
                before = self._before(index)
                rest = self._tail(other, before)
                begun = self.text[self._end_of(before) : start]
                rest = rest[len(begun) :] if rest is not None and rest.startswith(begun) else None
                if rest == "":
                    return 0
            if rest is not None:
                return self._closing(index, tail, rest, goes_on=goes_on)
        return self._first_stop(index, tail, 0)

    def _followed(self, index: int) -> Iterator[list[Turn]]:
        """Yield the conversation with possible next turns."""
        calls = self.messages[index].get("tool_calls")
        if isinstance(calls, list) and calls:
            ids = [call.get("id") for call in calls if isinstance(call, Mapping)]
            named = [{} if one is None else {"tool_call_id": one} for one in ids]
            yield [*self._turns, *({"role": "tool", "content": "Found", **one} for one in named)]
        yield [*self._turns, _USER]

    def _closing(self, index: int, tail: str, other: str, *, goes_on: bool) -> int:
        """Return the end of the end-of-turn token in ``tail``, from a comparison with another continuation."""
        shared = _common_prefix(tail, other)
        for text in (tail, other):
            for found in self._special.finditer(text):
                if found.start() < shared < found.end():
                    shared = found.start()
        part = tail[:shared].rstrip()
        ended = next((m[0] for m in self._special.finditer(part) if m.end() == len(part)), None)
        if ended in self.first:
            return len(part)
        stop = self._last_stop(tail, part)
        if stop is not None:
            return stop
        rest, other_rest = tail[shared:].lstrip(), other[shared:].lstrip()
        following, other_following = (self._special.match(text) for text in (rest, other_rest))
        is_stop = ended is None or other_following is not None or (following is not None and following[0] in self.stops)
        if following is not None and is_stop and not self._goes_on(rest):
            return len(tail) - len(rest) + following.end()
        if not rest or not other_rest or self._goes_on(rest):
            return len(part)  # the conversation ends here, or the assistant continues
        if goes_on:  # without a token that ends a turn, as before the answer of a tool inside the turn
            return len(_whole_words(part).rstrip())
        return self._first_stop(index, tail, shared)

    def _first_stop(self, index: int, tail: str, begin: int) -> int:
        """Return the end of the first end-of-turn token after ``begin`` that really ends the turn."""
        for found in self._special.finditer(tail, begin):
            if found[0] in self.stops and not self._goes_on(tail[found.end() :]):
                return found.end()
        raise self._lost(index)

    def _goes_on(self, text: str) -> bool:
        """Return whether the assistant's header follows."""
        header = self._header.strip()
        return bool(header) and text.lstrip().startswith(header)

    def _last_stop(self, tail: str, part: str) -> int | None:
        """Return the end of the last end-of-turn token in ``part``, a prefix of ``tail``, that really ends the turn."""
        ends = [found.end() for found in self._special.finditer(part) if found[0] in self.stops]
        return next((end for end in reversed(ends) if not self._goes_on(tail[end:])), None)

    def _stop_after(self, position: int) -> int | None:
        """Return the end of an end-of-turn token at ``position``, after optional white space."""
        rest = self.text[position : self._limit(position, None)]
        found = self._special.match(rest.lstrip())
        if found is None or found[0] not in self.stops:
            return None
        return position + len(rest) - len(rest.lstrip()) + found.end()


def first_special(text: str, special: Sequence[str]) -> str | None:
    """Return the special token at the beginning of ``text``, after white space."""
    text = text.lstrip()
    return max((token for token in special if text.startswith(token)), key=len, default=None)


# (assistant turn, turns that follow it)
_KINDS: list[tuple[Turn, list[Turn]]] = [
    (_ANSWER, [_USER, _ANSWER]),
    (
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        [{"role": "tool", "content": "Found", "tool_call_id": _CALL["id"]}, _ANSWER],
    ),
]


def learn_stops(render: Render, special: Sequence[str], configured: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """Find the special tokens that end the assistant's turns in a template.

    Renders small conversations with an answer and with a tool call; skips conversations that the template rejects.

    Args:
        render: renders a conversation.
        special: all special tokens.
        configured: end tokens of the checkpoint's config files.

    Returns:
        the tokens that stop generation (at the end of the conversation or, if there is none, before another turn), and
        all end-of-turn tokens.
    """
    final: list[str] = []
    stops: list[str] = []
    first: list[str] = []  # special tokens that follow the text of an answer
    for turn, following in _KINDS:
        ends: list[str] = []
        for turns in ([_USER, turn], [_USER, turn, *following]):
            try:
                text = render(turns, False)
                token = first_special(text.partition(_STAND_IN)[2], special)
                first += [token] if token is not None else []
                start, end = TurnFinder(render, turns, text, configured, special, first).assistant(1)[0]
            except DataError:
                continue
            ended = next((token for token in special if text.endswith(token, start, end)), None)
            ends += [ended] if ended is not None else []
        final += ends[:1]
        stops += ends
    return list(dict.fromkeys(final)), list(dict.fromkeys(stops))


_MOST = 4096  # cached sequences of roles
# (turns, masked) -> rendered text and its trained spans
Find = Callable[[list[dict[str, Any]], list[bool]], tuple[str, list[Span]]]
_TEXT = re.compile("(Text\ue010\\d+\ue011)")
# (number of turn texts that end before a position, layout characters before it)
_Place = tuple[int, int]


class Layouts:
    """Cache of the trained spans of conversations, for turns with only a role and a text.

    The layout (the text that the template writes around turns) is learned from a conversation with the same roles and
    placeholder texts. It applies to a conversation if layout and turn texts together equal the rendered text.
    Otherwise, for example if the template strips a text or drops reasoning, the result is None.

    Args:
        find: renders a conversation and finds its spans from further renderings.
    """

    def __init__(self, find: Find) -> None:
        self._find = find
        self._known: dict[Any, tuple[list[str], list[tuple[_Place, _Place]]] | None] = {}

    def fingerprint_parts(self) -> list[Any]:
        """Return an empty list: the template determines the cache."""
        return []

    def spans(self, text: str, turns: Sequence[Mapping[str, Any]], masked: Sequence[bool]) -> list[Span] | None:
        """Return (start, end) of the trained spans of ``text``, the rendered ``turns``; None if not known."""
        contents = []
        for turn in turns:
            content = turn.get("content")
            if len(turn) != 2 or not isinstance(content, str) or not content or content[-1].isspace():
                return None
            contents.append(content)
        key = (tuple(turn["role"] for turn in turns), tuple(masked))
        if key not in self._known:
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[key] = self._learn(*key)
        layout = self._known[key]
        if layout is None:
            return None
        around, places = layout
        pieces = [around[0]]
        for content, after in zip(contents, around[1:], strict=True):
            pieces += (content, after)
        if "".join(pieces) != text:
            return None
        ends = [0]
        for content in contents:
            ends.append(ends[-1] + len(content))
        return [(ends[a] + b, ends[c] + d) for (a, b), (c, d) in places]

    def _learn(
        self, roles: Sequence[str], masked: Sequence[bool]
    ) -> tuple[list[str], list[tuple[_Place, _Place]]] | None:
        texts = [f"Text\ue010{i}\ue011" for i in range(len(roles))]  # private-use characters, which no layout has
        turns = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
        try:
            text, spans = self._find(turns, list(masked))
        except DataError:  # the template rejects the placeholder texts
            return None
        pieces = _TEXT.split(text)
        around = pieces[::2]
        if pieces[1::2] != texts:
            return None
        before = [0, *accumulate(map(len, around))]  # layout characters before each piece
        ends = list(accumulate(map(len, pieces)))[::2]  # end of each layout piece in the text

        def place(position: int) -> _Place | None:
            count = bisect_left(ends, position)
            inside = position - (ends[count] - len(around[count]))
            return (count, before[count] + inside) if inside >= 0 else None

        places = [(place(start), place(end)) for start, end in spans]
        return (around, places) if all(None not in pair for pair in places) else None
