"""Spans of a rendered conversation that are trained on.

A chat template is a program: it may strip texts, drop the reasoning of earlier turns, add a system prompt or move it
into another turn. Therefore the conversation is rendered a second time with marks around the texts of its turns, which
locate each text. The passages between turn texts are compared with two other renderings: the generation prompt before a
turn shows where the model's output starts, and the conversation that ends after the turn shows where it ends. Both are
rendered once per kind of passage, so that the cost is linear in the length of the conversation.
"""

import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from torchtune.data import DataError
from torchtune.tokenizers._chat_template import ChatTemplate
from torchtune.tokenizers._marked_turns import (
    MarkedTurn,
    Marker,
    Rendering,
    Span,
    Turn,
    inner_span,
    marked_text,
    read_marks,
)
from torchtune.tokenizers._protocols import any_text_pattern

_DIGIT = re.compile(r"\d")
_STAND_IN = "StandInText"
_USER = {"role": "user", "content": "Question"}
_ANSWER = {"role": "assistant", "content": _STAND_IN}
_CALL = {"type": "function", "id": "call00000", "function": {"name": "standInCall", "arguments": {"at": "it"}}}
_TOOL_RESULT = {"role": "tool", "content": "Found"}
# Role -> noun for the messages about its omitted texts.
_OMITTED_TEXT = {
    "system": "system text",
    "developer": "system text",
    "user": "text of user turns",
    "tool": "results of tools",
    "assistant": "text of assistant turns",
}


def common_prefix(left: str, right: str) -> int:
    """Return the length of the common prefix, by binary search: comparing slices is faster than a Python loop."""
    low = 0
    high = min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _whole_words(text: str) -> str:
    """Cut ``text`` after its last white space or closing bracket, because the end may be part of a tag."""
    return re.fullmatch(r"((?:.*[\s>\]])?).*", text, re.S)[1]


class TurnFinder:
    """Locates the turns of one rendered conversation.

    Args:
        template: the chat template.
        messages: the conversation as the template's input.
        text: the rendered conversation.
        stops: special tokens that may end an assistant turn.
        special: all special tokens.
        tools: tools of the conversation.
        answer_ends: special tokens that follow the text of an answer, while ``stops`` are not known yet.
    """

    def __init__(
        self,
        template: ChatTemplate,
        messages: Sequence[Turn],
        text: str,
        stops: Sequence[str],
        special: Sequence[str],
        *,
        tools: Sequence[Any] | None = None,
        answer_ends: Sequence[str] = (),
    ) -> None:
        self._template = template
        self._tools = tools
        self.messages = list(messages)
        self.text = text
        self.stops = tuple(stops)
        self.answer_ends = (*stops, *answer_ends)
        self._special = re.compile(any_text_pattern({*special, *stops}))
        # Offsets by kind of passage.
        self._start_offsets: dict[Any, int] = {}
        self._end_offsets: dict[Any, int] = {}
        marker = Marker()
        self._marked_turns: list[MarkedTurn] = []
        self._numbers: list[range] = []  # of the texts of each turn
        self._turn_of_number = [-1]  # numbers begin at 1
        for index, turn in enumerate(self.messages):
            first_number = marker.count + 1
            self._marked_turns.append(marker.turn(turn))
            numbers = range(first_number, marker.count + 1)
            self._numbers.append(numbers)
            self._turn_of_number += [index] * len(numbers)
        self._texts = marker.texts

    @cached_property
    def _marked_rendering(self) -> Rendering | None:
        """Rendering with marks; None if the marks change the text."""
        rendering = self._rendered([marked.turn for marked in self._marked_turns], add_generation_prompt=False)
        if rendering is None or rendering.text != self.text:
            return None
        return rendering

    @property
    def _spans(self) -> dict[int, Span]:
        """Span of each marked text; empty if the marks change the text."""
        if self._marked_rendering is None:
            return {}
        return self._marked_rendering.spans

    @cached_property
    def _turns(self) -> list[Turn]:
        """The turns for other renderings: with marks, unless these change the text."""
        if self._marked_rendering is None:
            return self.messages
        return [marked.turn for marked in self._marked_turns]

    @cached_property
    def _order(self) -> list[int]:
        """Numbers of the marked texts, in the order of the rendered text."""
        return sorted(self._spans, key=lambda number: (*self._spans[number], number))

    @cached_property
    def _rank(self) -> dict[int, int]:
        """Position in :attr:`_order` of each marked text."""
        return {number: rank for rank, number in enumerate(self._order)}

    def trained(self, masked: Sequence[bool], generated: Sequence[Span]) -> list[Span]:
        """Return the spans of the turns that are trained on, in order.

        Args:
            masked: whether each turn is masked.
            generated: spans of the template's ``{% generation %}`` blocks in the text.

        Raises:
            DataError: a turn cannot be located, or the template does not write it.
        """
        assistant_turns = [i for i, turn in enumerate(self.messages) if turn["role"] == "assistant"]
        generated_by_turn: dict[int, Span] = {}
        # With another number of blocks, it is not known which block is whose: the turns are looked for.
        if self._template.marks_generation and len(generated) == len(assistant_turns):
            generated_by_turn = dict(zip(assistant_turns, generated, strict=True))
        spans: list[Span] = []
        for i, turn in enumerate(self.messages):
            if masked[i]:
                continue
            if i in generated_by_turn:
                self.check_written(i)
                spans.append(self._with_stop(generated_by_turn[i]))
            elif turn["role"] == "assistant":
                spans += self.assistant(i)
            else:
                spans.append(self.other(i))
        return sorted(spans)

    def _with_stop(self, block: Span) -> Span:
        """Extend a generation block without end-of-turn token to the end-of-turn token that follows."""
        start, end = block
        stripped_end = start + len(self.text[start:end].rstrip())
        if self.text.endswith(self.stops, start, stripped_end):
            return start, stripped_end
        following = self.text[end:].lstrip()
        stop = first_special(following, self.stops)
        if stop is None:
            return start, end
        return start, len(self.text) - len(following) + len(stop)

    def assistant(self, index: int) -> list[Span]:
        """Return the spans of turn ``index`` that the model generates.

        A span reaches from the end of the generation prompt to the end-of-turn token, without white space after the
        token. There are several spans if the template puts another turn inside this one, such as a tool's answer before
        the text that accompanies the call.

        Raises:
            DataError: the spans cannot be determined, or the template omits the turn, its text or one of its calls.
        """
        self.check_written(index)
        start = self._start(index)
        spans: list[Span] = []
        text_runs = self._text_runs(index)
        if not text_runs:
            spans.append((start, self._end(index, start, None, continues=False)))
        for first_text, last_text in text_runs:
            if spans:  # behind the text of another turn, no generation prompt shows where the model goes on
                start = self._spans[first_text][0]
            # The end-of-turn token may be missing where the assistant continues, in this turn or the next.
            continues = (first_text, last_text) != text_runs[-1]
            next_rank = self._rank[last_text] + 1
            if next_rank < len(self._order):
                next_turn = self._turn_of_number[self._order[next_rank]]
                continues = continues or self.messages[next_turn]["role"] == "assistant"
            spans.append((start, self._end(index, start, last_text, continues=continues)))
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
        if self._marked_rendering is None:  # marks would change the rendering: what is written is unknown
            return
        marked = self._marked_turns[index]
        num_calls = len(marked.calls)
        num_written = sum(number in self._spans for number in marked.calls)
        if num_calls and not num_written and not self._has_calls:
            raise DataError(
                f"the chat template has no tool calls, but turn {index} has {num_calls}: set the tokenizer's "
                "chat_template to one that writes them, write the calls into the turn's content, or leave the row out"
            )
        if num_written < num_calls:
            raise DataError(
                f"the chat template writes {num_written} of the {num_calls} tool_calls of turn {index}: divide "
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
        call = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
        rendering = self._rendered([_USER, call], add_generation_prompt=False)
        return rendering is not None and _CALL["function"]["name"] in rendering.text

    def omitted(self, ignored: Collection[int] = ()) -> list[str]:
        """Return the kinds of texts that the template omits, as nouns for messages.

        Args:
            ignored: turns whose reasoning may be omitted.
        """
        kinds: list[str] = []
        for index, marked in enumerate(self._marked_turns):
            if marked.text and not self._is_written(marked.text):
                role = self.messages[index]["role"]
                kind = _OMITTED_TEXT.get(role, f"text of turns of '{role}'")
                if marked.calls:
                    kind = "text beside tool calls"
                kinds.append(kind)
            if marked.reasoning and index not in ignored and not self._is_written(marked.reasoning):
                kinds.append("reasoning")
        return kinds

    def _is_written(self, numbers: Sequence[int]) -> bool:
        """Return whether one of the marked texts is in the rendered text."""
        if self._marked_rendering is None:  # the marks change the text: look for the text itself
            return any(self._texts[number] in self.text for number in numbers)
        return any(number in self._spans for number in numbers)

    def other(self, index: int) -> Span:
        """Return the span of a user, system or tool turn's text, with its end-of-turn token.

        Raises:
            DataError: the span cannot be determined.
        """
        numbers = [number for number in self._numbers[index] if number in self._spans]
        if not numbers:
            raise self._not_located(index)
        start = self._spans[numbers[0]][0]
        end = self._spans[numbers[-1]][1]
        # The marks enclose the inner text only. Add the outer white space and tags that the template has kept.
        content = self.messages[index]["content"]
        first, last = inner_span(content)
        before = self.text[max(0, start - first) : start]
        reversed_opening = content[:first][::-1]
        start -= common_prefix(reversed_opening, before[::-1])  # the common end of both
        closing = content[last:]
        end += common_prefix(closing, self.text[end : end + len(closing)])
        # An end-of-turn token after the text belongs to the turn.
        passage = self.text[end : self._next_text_start(end, None)]
        following = passage.lstrip()
        token = self._special.match(following)
        if token is not None and token[0] in self.stops:
            end += len(passage) - len(following) + token.end()
        return start, end

    def _not_located(self, index: int) -> DataError:
        """Return the error for a turn whose part of the rendered conversation cannot be told."""
        return DataError(
            f"cannot tell which part of the rendered conversation is turn {index} ({self.messages[index]['role']}): "
            "the chat template rearranges it; mark the assistant's part with {% generation %} in the template"
        )

    def _rendered(self, messages: Sequence[Turn], *, add_generation_prompt: bool) -> Rendering | None:
        """Render messages; None if the template rejects a conversation that ends here."""
        try:
            text, _ = self._template.render(messages, add_generation_prompt=add_generation_prompt, tools=self._tools)
        except DataError:
            return None
        return read_marks(text)

    def _text_runs(self, index: int) -> list[tuple[int, int]]:
        """Return (first, last) text number of each run of texts of a turn, without another turn's text in between."""
        ranks = sorted(self._rank[number] for number in self._numbers[index] if number in self._rank)
        text_runs: list[tuple[int, int]] = []
        for rank in ranks:
            number = self._order[rank]
            if text_runs and self._rank[text_runs[-1][1]] == rank - 1:
                text_runs[-1] = (text_runs[-1][0], number)
            else:
                text_runs.append((number, number))
        return text_runs

    def _text_before(self, index: int) -> int | None:
        """Return the number of the last text before turn ``index`` that belongs to an earlier turn."""
        text_runs = self._text_runs(index)
        if not text_runs:  # a turn without a written text follows the last earlier one with a text
            for earlier in range(index - 1, -1, -1):
                earlier_runs = self._text_runs(earlier)
                if earlier_runs:
                    return earlier_runs[-1][1]
            return None
        # A template may write texts of later turns before this one.
        rank = self._rank[text_runs[0][0]] - 1
        while rank >= 0 and self._turn_of_number[self._order[rank]] >= index:
            rank -= 1
        if rank < 0:
            return None
        return self._order[rank]

    def _end_of_text(self, number: int | None) -> int:
        """Return the end of a marked text; the beginning of the conversation for None."""
        if number is None:
            return 0
        return self._spans[number][1]

    def _next_text_start(self, position: int, after: int | None) -> int:
        """Return where the next marked text begins: after text number ``after`` or, if it is None, after a position."""
        if after is not None:
            rank = self._rank[after] + 1
        else:
            rank = bisect_left(self._order, position, key=lambda number: self._spans[number][0])
        if rank == len(self._order):
            return len(self.text)
        return self._spans[self._order[rank]][0]

    def _passage_key(self, passage: str, first_turn: int, index: int) -> Any:
        """Return a cache key that is equal for passages that differ only in digits and call ids."""
        turns = self.messages[first_turn : index + 2]
        for turn in turns:
            call_ids = [turn.get("tool_call_id")]
            calls = turn.get("tool_calls")
            if isinstance(calls, list):
                call_ids += [call.get("id") for call in calls if isinstance(call, Mapping)]
            for call_id in call_ids:
                if call_id and isinstance(call_id, str):
                    passage = passage.replace(call_id, "0" * len(call_id))
        return _DIGIT.sub("0", passage), tuple(turn["role"] for turn in turns), index - first_turn

    def _tail(self, rendering: Rendering | None, number: int | None) -> str | None:
        """Return the text of another rendering after a marked text; None if the marked text is missing."""
        if rendering is None:
            return None
        if number is None:
            return rendering.text
        if number not in rendering.spans:
            return None
        return rendering.text[rendering.spans[number][1] :]

    def _start(self, index: int) -> int:
        """Return the position at which the model begins to generate turn ``index``."""
        before = self._text_before(index)
        base = self._end_of_text(before)
        limit = self._next_text_start(base, before)
        first_turn = 0
        if before is not None:
            first_turn = self._turn_of_number[before]
        key = self._passage_key(self.text[base:limit], first_turn, index)
        if key not in self._start_offsets:
            self._start_offsets[key] = self._find_start(index, before, base, limit) - base
        return base + self._start_offsets[key]

    def _find_start(self, index: int, before: int | None, base: int, limit: int) -> int:
        """Find the start of a turn in the passage from ``base``, the end of text number ``before``, to ``limit``."""
        if index and not self._text_runs(index - 1):
            start = self._find_start_after_blank(index)
            if start is not None:
                return start
        passage = self.text[base:limit]
        header = self._header
        prompt = self._tail(self._rendered(self._turns[:index], add_generation_prompt=True), before)
        if prompt is not None:
            num_shared = common_prefix(prompt, self.text[base : base + len(prompt)])
            if num_shared == len(prompt):
                start = base + num_shared
                # The generation prompt of some templates has no header, which the model then generates itself.
                if header and passage.startswith(header, num_shared):
                    start += len(header)
                return start
            if num_shared >= len(passage):
                return limit  # the generation prompt adds text, such as <think>, that a finished turn lacks
            # Otherwise the generation prompt differs from the finished turn.
            offset = len(_whole_words(passage[:num_shared]))
            first_turn = 0
            if before is not None:
                first_turn = self._turn_of_number[before] + 1
            are_written = all(self._text_runs(turn) for turn in range(first_turn, index))
            is_continuation = header not in passage and are_written
            if header and (header in passage[:offset] or is_continuation):
                return base + offset
        # Without a prompt to compare with, the turn begins behind the last header before its text.
        if not header or header not in passage:
            raise self._not_located(index)
        return base + passage.rfind(header) + len(header)

    def _find_start_after_blank(self, index: int) -> int | None:
        """Find the start of a turn after a turn without text, by rendering with a text inserted there."""
        turns = [*self._turns]
        turns[index - 1] = {**turns[index - 1], "content": marked_text("x", 0)}
        # Behind the inserted text, the conversation has to go on as without it.
        tail = self._tail(self._rendered(turns, add_generation_prompt=False), 0)
        if tail is None or not self.text.endswith(tail):
            return None
        prompt = self._tail(self._rendered(turns[:index], add_generation_prompt=True), 0)
        if prompt is None or not tail.startswith(prompt):
            return None
        return len(self.text) - len(tail) + len(prompt)

    @cached_property
    def _header(self) -> str:
        """The assistant's header: the part of the generation prompt that finished turns share."""
        marker = Marker()
        turns = [marker.turn(turn).turn for turn in (_USER, _ANSWER, _USER, _ANSWER)]
        with_prompt = self._tail(self._rendered(turns[:1], add_generation_prompt=True), 1)
        without_prompt = self._tail(self._rendered(turns[:1], add_generation_prompt=False), 1)
        if with_prompt is None or without_prompt is None or not with_prompt.startswith(without_prompt):
            return ""
        header = with_prompt[len(without_prompt) :]
        # A finished turn may lack the end of what the prompt adds, such as <think>: the last turn, or an earlier one.
        for finished in (turns[:2], turns):
            tail = self._tail(self._rendered(finished, add_generation_prompt=False), 1)
            if tail is not None and tail.startswith(without_prompt):
                num_shared = common_prefix(header, tail[len(without_prompt) :])
                if num_shared < len(header):
                    header = _whole_words(header[:num_shared])
        return header

    def _end(self, index: int, start: int, last_text: int | None, *, continues: bool) -> int:
        """Return the end of the model's output from ``start`` on.

        Args:
            index: turn of the assistant.
            start: start of the output.
            last_text: number of the last text of the output; None if it has none.
            continues: whether the assistant continues after this output, in this turn or the next.
        """
        base = self._end_of_text(last_text)
        if last_text is None or base < start:
            last_text = None
            base = start
        passage = self.text[base : self._next_text_start(base, last_text)]
        key = (*self._passage_key(passage, index, index), last_text is None, continues)
        if key not in self._end_offsets:
            self._end_offsets[key] = self._find_end(index, last_text, start, passage, continues=continues)
        return base + self._end_offsets[key]

    def _find_end(self, index: int, last_text: int | None, start: int, passage: str, *, continues: bool) -> int:
        """Return the number of characters of ``passage``, the text after a turn's last text, that the model generates.

        The passage is compared with a rendering in which another turn follows, or none.

        Args:
            index: number of the turn.
            last_text: number of the turn's last text; None if it has none.
            start: position of the passage.
            passage: the text after the turn's last text.
            continues: whether the next turn is the assistant's, too.
        """
        is_last = index == len(self.messages) - 1
        special_tokens = list(self._special.finditer(passage))
        if is_last and not special_tokens:
            return len(passage)
        if is_last and len(special_tokens) == 1:  # it ends the turn
            return special_tokens[0].end()
        continuations: Iterable[list[Turn]] = [self._turns[: index + 1]]  # the conversation that ends here
        if is_last:
            continuations = self._continuations(index)
        for messages in continuations:
            rendering = self._rendered(messages, add_generation_prompt=False)
            if last_text is not None:
                tail = self._tail(rendering, last_text)
            else:
                # The turn has no text by which it is found: it opens behind the text of an earlier turn.
                before = self._text_before(index)
                opening = self.text[self._end_of_text(before) : start]
                tail = self._tail(rendering, before)
                if tail is not None and not tail.startswith(opening):
                    tail = None
                if tail is not None:
                    tail = tail[len(opening) :]
                if tail == "":  # a conversation that ends here has nothing behind the opening
                    return 0
            if tail is not None:
                return self._find_closing(index, passage, tail, continues=continues)
        return self._first_stop(index, passage, 0)

    def _continuations(self, index: int) -> Iterator[list[Turn]]:
        """Yield the conversation with possible next turns."""
        calls = self.messages[index].get("tool_calls")
        if isinstance(calls, list) and calls:
            results: list[Turn] = []
            for call in calls:
                if isinstance(call, Mapping):
                    result = dict(_TOOL_RESULT)
                    if call.get("id") is not None:
                        result["tool_call_id"] = call["id"]
                    results.append(result)
            yield [*self._turns, *results]
        yield [*self._turns, _USER]

    def _find_closing(self, index: int, passage: str, other: str, *, continues: bool) -> int:
        """Return the end of the end-of-turn token in ``passage``, from a comparison with another continuation."""
        num_shared = common_prefix(passage, other)
        # Do not cut a special token in two.
        for text in (passage, other):
            for token in self._special.finditer(text):
                if token.start() < num_shared < token.end():
                    num_shared = token.start()
        shared = passage[:num_shared].rstrip()
        last_token = None
        for token in self._special.finditer(shared):
            if token.end() == len(shared):
                last_token = token[0]
        if last_token in self.answer_ends:
            return len(shared)
        for token in reversed(list(self._special.finditer(shared))):
            if token[0] in self.stops and not self._begins_with_header(passage[token.end() :]):
                return token.end()
        following = passage[num_shared:].lstrip()
        other_following = other[num_shared:].lstrip()
        next_token = self._special.match(following)
        if next_token is not None and not self._begins_with_header(following):
            is_stop = next_token[0] in self.stops
            # While stops are not learned yet: both conversations have a token here, which depends on what follows.
            differs_from_other = self._special.match(other_following) is not None
            if last_token is None or is_stop or differs_from_other:
                return len(passage) - len(following) + next_token.end()
        if not following or not other_following or self._begins_with_header(following):
            return len(shared)  # the conversation ends here, or the assistant continues
        if continues:  # without a token that ends a turn, as before the answer of a tool inside the turn
            return len(_whole_words(shared).rstrip())
        return self._first_stop(index, passage, num_shared)

    def _first_stop(self, index: int, passage: str, begin: int) -> int:
        """Return the end of the first end-of-turn token after ``begin`` that really ends the turn."""
        for token in self._special.finditer(passage, begin):
            if token[0] in self.stops and not self._begins_with_header(passage[token.end() :]):
                return token.end()
        raise self._not_located(index)

    def _begins_with_header(self, text: str) -> bool:
        """Return whether the assistant continues after a token: its header follows."""
        header = self._header.strip()
        return bool(header) and text.lstrip().startswith(header)


def first_special(text: str, special: Sequence[str]) -> str | None:
    """Return the special token at the beginning of ``text``, after white space."""
    text = text.lstrip()
    return max((token for token in special if text.startswith(token)), key=len, default=None)


# Kinds of assistant turns: (turn, turns that follow it).
_ASSISTANT_TURNS: list[tuple[Turn, list[Turn]]] = [
    (_ANSWER, [_USER, _ANSWER]),
    (
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        [{**_TOOL_RESULT, "tool_call_id": _CALL["id"]}, _ANSWER],
    ),
]


def learn_stops(
    template: ChatTemplate, special: Sequence[str], configured: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Find the special tokens that end the assistant's turns in a template.

    Renders small conversations with an answer and with a tool call; skips conversations that the template rejects.

    Args:
        template: the chat template.
        special: all special tokens.
        configured: end tokens of the checkpoint's config files.

    Returns:
        the tokens that stop generation (at the end of the conversation or, if there is none, before another turn), and
        all end-of-turn tokens.
    """
    generation_stops: list[str] = []
    stops: list[str] = []
    answer_ends: list[str] = []
    for turn, following_turns in _ASSISTANT_TURNS:
        kind_stops: list[str] = []
        # At the end of the conversation, and before other turns: a template may end both differently.
        for turns in ([_USER, turn], [_USER, turn, *following_turns]):
            try:
                text, _ = template.render(turns)
                # The token behind the text of an answer is an end, whatever the config files say.
                _, _, behind_answer = text.partition(_STAND_IN)
                answer_end = first_special(behind_answer, special)
                if answer_end is not None:
                    answer_ends.append(answer_end)
                finder = TurnFinder(template, turns, text, configured, special, answer_ends=answer_ends)
                start, end = finder.assistant(1)[0]
            except DataError:  # the template takes no such conversation
                continue
            ending = [token for token in special if text.endswith(token, start, end)]
            kind_stops += ending[:1]
        generation_stops += kind_stops[:1]
        stops += kind_stops
    return list(dict.fromkeys(generation_stops)), list(dict.fromkeys(stops))


_MAX_LAYOUTS = 4096
_PLACEHOLDER = re.compile("(Text\ue010\\d+\ue011)")
# Position in a layout: (number of turn texts that end before it, layout characters before it).
_Position = tuple[int, int]


class _Layout(NamedTuple):
    """Text that a template writes around the turns of a sequence of roles, and the trained spans.

    Attributes:
        around: layout before the first turn, between turns, and after the last turn.
        spans: (start, end) of each trained span.
    """

    around: list[str]
    spans: list[tuple[_Position, _Position]]


class LayoutCache:
    """Cache of the trained spans of conversations, for turns with only a role and a text.

    The layout (the text that the template writes around turns) is learned from a conversation with the same roles and
    placeholder texts. It applies to a conversation if layout and turn texts together equal the rendered text.
    Otherwise, for example if the template strips a text or drops reasoning, the result is None.

    Args:
        stops: special tokens that may end an assistant turn.
        special: all special tokens.
    """

    def __init__(self, stops: Sequence[str], special: Sequence[str]) -> None:
        self._stops = stops
        self._special = special
        self._layouts: dict[Any, _Layout | None] = {}  # None: the template does not write the placeholders as texts

    def fingerprint_parts(self) -> list[Any]:
        """Return an empty list: the template determines the cache."""
        return []

    def spans(
        self, template: ChatTemplate, turns: Sequence[Turn], text: str, masked: Sequence[bool]
    ) -> list[Span] | None:
        """Return the trained spans of a rendered conversation without tools; None if its layout does not show them.

        Args:
            template: the chat template, always the same.
            turns: the conversation as the template's input.
            text: the rendered conversation.
            masked: whether each turn is masked.
        """
        contents = []
        for turn in turns:
            content = turn.get("content")
            # Templates treat other fields and texts without a word in ways that placeholders do not show.
            if len(turn) != 2 or not isinstance(content, str) or not content or content.isspace():
                return None
            # Where no token ends the turn, an answer is trained on without the white space at its end, and the end of a
            # placeholder is that of its text. Other turns may end with it: their spans have it, if the template has.
            if turn["role"] == "assistant" and content[-1].isspace():
                return None
            contents.append(content)
        # The layout between the texts depends on roles and masks alone, which most conversations share: learned once,
        # it saves the renderings that find the spans.
        key = (tuple(turn["role"] for turn in turns), tuple(masked))
        if key not in self._layouts:
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts.clear()
            self._layouts[key] = self._learn_layout(template, *key)
        layout = self._layouts[key]
        if layout is None:
            return None
        pieces = [layout.around[0]]
        for content, after in zip(contents, layout.around[1:], strict=True):
            pieces += (content, after)
        if "".join(pieces) != text:
            return None
        content_ends = [0, *accumulate(map(len, contents))]
        spans = []
        for (start_texts, start_layout), (end_texts, end_layout) in layout.spans:
            start = content_ends[start_texts] + start_layout
            end = content_ends[end_texts] + end_layout
            spans.append((start, end))
        return spans

    def _learn_layout(self, template: ChatTemplate, roles: Sequence[str], masked: Sequence[bool]) -> _Layout | None:
        """Return the layout of a sequence of roles; None if the template does not write the placeholders as texts."""
        placeholders = [f"Text\ue010{i}\ue011" for i in range(len(roles))]  # private-use characters, as in no layout
        turns = [{"role": role, "content": text} for role, text in zip(roles, placeholders, strict=True)]
        try:
            text, generated = template.render(turns)
            spans = TurnFinder(template, turns, text, self._stops, self._special).trained(masked, generated)
        except DataError:  # the template rejects the placeholder texts
            return None
        pieces = _PLACEHOLDER.split(text)
        around = pieces[::2]
        if pieces[1::2] != placeholders:
            return None
        num_before = [0, *accumulate(map(len, around))]  # layout characters before each piece of the layout
        around_ends = list(accumulate(map(len, pieces)))[::2]  # end of each piece of the layout in the text

        def position_in_layout(position: int) -> _Position | None:
            num_texts = bisect_left(around_ends, position)  # the end of a piece still belongs to it
            offset = position - (around_ends[num_texts] - len(around[num_texts]))
            if offset < 0:  # inside a placeholder
                return None
            return num_texts, num_before[num_texts] + offset

        layout_spans = []
        for start, end in spans:
            layout_start = position_in_layout(start)
            layout_end = position_in_layout(end)
            if layout_start is None or layout_end is None:
                return None
            layout_spans.append((layout_start, layout_end))
        return _Layout(around, layout_spans)
