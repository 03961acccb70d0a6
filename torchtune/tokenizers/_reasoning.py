"""Reasoning of earlier turns: detection of a chat template's policy, and the policies keep and split."""

import uuid
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any, Literal, NamedTuple

from torchtune.data import REASONING_FIELDS, DataError, Message

ReasoningPolicy = Literal["strip", "keep", "split"]
_END = "</think>"  # ends reasoning inside of a turn's text
_KEY = f"k{uuid.uuid4().hex}"  # letters and digits only, like all marks
Turn = Mapping[str, Any]
Span = tuple[int, int]


class _Block(NamedTuple):
    """Reasoning of a turn: its mark, and the text that replaces the mark and ``before`` characters in front of it."""

    mark: str
    text: str
    before: int
    begin: int | None  # position of the model's output, relative to the mark; None without a fitting prompt


def earlier_reasoning(turns: Sequence[Turn]) -> list[int]:
    """Return the assistant turns with reasoning before a later user turn; templates strip their reasoning."""
    last = max((i for i, turn in enumerate(turns) if turn["role"] == "user"), default=0)
    return [
        i
        for i, turn in enumerate(turns[:last])
        if turn["role"] == "assistant"
        and (any(turn.get(name) for name in REASONING_FIELDS) or _END in str(turn.get("content")))
    ]


class KeptReasoning:
    """Restores the reasoning of earlier turns in a rendered conversation, as the template writes it in a last turn.

    Args:
        render: (turns, add_generation_prompt) -> text.
        turns: the conversation as the template's input.

    Attributes:
        turns: the conversation with marks instead of reasoning.

    Raises:
        DataError: the template omits reasoning from last turns, too, or rearranges the turns.
    """

    def __init__(self, render: Callable[[Sequence[Turn], bool], str], turns: Sequence[Turn]) -> None:
        self.turns = list(turns)
        self._blocks: list[_Block] = []
        for i in earlier_reasoning(turns):
            turn, mark = turns[i], f"{_KEY}n{i}q"
            head, end, rest = turn["content"].rpartition(_END)
            rest = rest.lstrip("\n")
            plain = {name: value for name, value in turn.items() if name not in REASONING_FIELDS}
            self.turns[i] = {**plain, "content": mark + rest}
            before = self.turns[:i]
            old, _, _ = render(self.turns, False).partition(mark)
            last, _, tail = render([*before, {**turn, "content": f"{head}{end}{mark}{rest}"}], False).partition(mark)
            prompt = render(before, True)
            if last == old or not last.startswith(render(before, False)):
                raise DataError(
                    f"reasoning=keep: the chat template writes no reasoning for turn {i} (assistant) even if it is the "
                    "last one: use reasoning=strip"
                )
            if not rest:  # the mark makes the text non-empty, for which a template may write more
                real = render([*before, turn], False)[len(last) :]
                mark += tail.removesuffix(real) if tail.endswith(real) else ""
            same = next(
                (k for k, (a, b) in enumerate(zip(old, last, strict=False)) if a != b), min(len(old), len(last))
            )
            begin = len(prompt) - len(old) if last.startswith(prompt) else None
            self._blocks.append(_Block(mark, last[same:], len(old) - same, begin))

    def expand(self, text: str, spans: Sequence[Span] = ()) -> tuple[str, list[Span]]:
        """Replace the marks in a rendered text, and adjust the spans; each span begins where the prompt ends."""
        for block in reversed(self._blocks):
            at = text.index(block.mark)
            start, end = at - block.before, at + len(block.mark)
            more = len(block.text) - (end - start)
            text = text[:start] + block.text + text[end:]
            begin = start if block.begin is None else at + block.begin
            spans = [
                (first + more * (first >= end) if first > at or last <= at else begin, last + more * (last > at))
                for first, last in spans
            ]
        return text, list(spans)


def split_turns(messages: Sequence[Message], turns: Sequence[Turn]) -> list[list[Message]]:
    """Return a conversation for each trained assistant turn, up to this turn; turns of earlier samples are masked.

    A conversation without reasoning in earlier turns stays whole, because a template writes all its turns alike.
    """
    if not earlier_reasoning(turns):
        return [list(messages)]
    samples, done = [], 0
    for i, message in enumerate(messages):
        if message.role == "assistant" and not message.masked:
            sample = [copy(each) for each in messages[: i + 1]]
            for each in sample[:done]:
                each.masked = True
            samples.append(sample)
            done = i + 1
    return samples or [list(messages)]
