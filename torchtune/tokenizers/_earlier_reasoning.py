"""Reasoning of the assistant's turns before the last user turn, which most chat templates strip.

Two policies of a tokenizer's ``reasoning`` train on it. For ``keep``, :class:`KeptReasoning` writes it into the
rendered conversation; for ``split``, :func:`split_turns` makes a conversation of each turn.
"""

import uuid
from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple

from torchtune.data import REASONING_FIELDS, DataError, Message
from torchtune.tokenizers._chat_template import ChatTemplate
from torchtune.tokenizers._trained_spans import Span, Turn, common_prefix

_REASONING_END = "</think>"  # ends reasoning inside of a turn's text
_MARK_KEY = f"k{uuid.uuid4().hex}"  # letters and digits only, which templates leave unchanged


class _Block(NamedTuple):
    """Reasoning of a turn, which a mark stands for in the rendered conversation.

    Attributes:
        mark: the mark.
        text: text that replaces the mark and ``num_before`` characters in front of it.
        num_before: see ``text``.
        output_start: position of the model's output, relative to the mark; None if the generation prompt differs from
            the finished turn.
    """

    mark: str
    text: str
    num_before: int
    output_start: int | None


def earlier_reasoning(turns: Sequence[Turn]) -> list[int]:
    """Return the assistant turns with reasoning before a later user turn; templates strip their reasoning."""
    last_user = 0
    for i, turn in enumerate(turns):
        if turn["role"] == "user":
            last_user = i
    indices = []
    for i, turn in enumerate(turns[:last_user]):
        if turn["role"] != "assistant":
            continue
        has_field = any(turn.get(name) for name in REASONING_FIELDS)
        if has_field or _REASONING_END in str(turn.get("content")):
            indices.append(i)
    return indices


class KeptReasoning:
    """Restores the reasoning of earlier turns in a rendered conversation, as the template writes it in a last turn.

    Args:
        template: the chat template.
        turns: the conversation as the template's input.
        tools: tools of the conversation.

    Attributes:
        turns: the conversation with marks instead of reasoning.

    Raises:
        DataError: the template omits reasoning from last turns, too, or rearranges the turns.
    """

    def __init__(self, template: ChatTemplate, turns: Sequence[Turn], tools: Sequence[Any] | None) -> None:
        self.turns = list(turns)
        self._template = template
        self._tools = tools
        self._blocks: list[_Block] = []
        for index in earlier_reasoning(turns):
            self._blocks.append(self._replace_reasoning(turns, index))

    def _render(self, turns: Sequence[Turn], *, add_generation_prompt: bool = False) -> str:
        text, _ = self._template.render(turns, add_generation_prompt=add_generation_prompt, tools=self._tools)
        return text

    def _replace_reasoning(self, turns: Sequence[Turn], index: int) -> _Block:
        """Replace the reasoning of a turn by a mark, and return the text that the template would write for it."""
        turn = turns[index]
        mark = f"{_MARK_KEY}n{index}q"
        thoughts, end, answer = turn["content"].rpartition(_REASONING_END)  # without it, the reasoning is in a field
        answer = answer.lstrip("\n")
        turn_without_reasoning = {name: value for name, value in turn.items() if name not in REASONING_FIELDS}
        self.turns[index] = {**turn_without_reasoning, "content": mark + answer}

        before = self.turns[:index]
        marked_last_turn = {**turn, "content": f"{thoughts}{end}{mark}{answer}"}
        # The text before the mark, with the turn as an earlier one without reasoning, and as the last one with it.
        stripped, _, _ = self._render(self.turns).partition(mark)
        written, _, tail = self._render([*before, marked_last_turn]).partition(mark)
        if written == stripped or not written.startswith(self._render(before)):
            raise DataError(
                f"reasoning=keep: the chat template writes no reasoning for turn {index} (assistant) even if it is the "
                "last one: use reasoning=strip"
            )
        replaced = mark
        if not answer:  # the mark makes the text non-empty, for which a template may write more: it goes with the mark
            tail_without_mark = self._render([*before, turn])[len(written) :]
            if tail.endswith(tail_without_mark):
                replaced += tail.removesuffix(tail_without_mark)

        # Only the text behind the first difference is replaced: it is what the reasoning changes.
        num_same = common_prefix(stripped, written)
        # Where the model's output begins, relative to the mark: the template may write a part of it for the prompt.
        prompt = self._render(before, add_generation_prompt=True)
        output_start = None
        if written.startswith(prompt):
            output_start = len(prompt) - len(stripped)
        return _Block(replaced, written[num_same:], len(stripped) - num_same, output_start)

    def restore(self, text: str, spans: Sequence[Span] = ()) -> tuple[str, list[Span]]:
        """Replace the marks in a rendered text by the reasoning, and adjust the spans to the longer text.

        The span of a turn with reasoning begins where the model's output does; spans of later turns move.
        """
        spans = list(spans)
        # From the last mark to the first, so that a longer text does not move the marks that are still to come.
        for block in reversed(self._blocks):
            mark_start = text.index(block.mark)
            start = mark_start - block.num_before
            end = mark_start + len(block.mark)
            text = text[:start] + block.text + text[end:]
            num_added = len(block.text) - (end - start)
            output_start = start
            if block.output_start is not None:
                output_start = mark_start + block.output_start
            for i, (first, last) in enumerate(spans):
                if first <= mark_start < last:  # the span of this turn
                    first = output_start
                elif first >= end:
                    first += num_added
                if last > mark_start:
                    last += num_added
                spans[i] = (first, last)
        return text, spans


def split_turns(messages: Sequence[Message], turns: Sequence[Turn]) -> list[list[Message]]:
    """Return a conversation for each trained assistant turn, up to this turn; turns of earlier samples are masked.

    A conversation without reasoning in earlier turns stays whole, because a template writes all its turns alike.
    """
    if not earlier_reasoning(turns):
        return [list(messages)]
    samples: list[list[Message]] = []
    num_trained = 0  # turns that earlier samples contain
    for i, message in enumerate(messages):
        if message.role != "assistant" or message.masked:
            continue
        sample = [copy(earlier) for earlier in messages[: i + 1]]
        for trained in sample[:num_trained]:
            trained.masked = True
        samples.append(sample)
        num_trained = i + 1
    return samples or [list(messages)]


def stripped_turns(template: ChatTemplate, turns: Sequence[Turn]) -> set[int]:
    """Return the turns that lose their reasoning only because a user turn follows: a last turn would keep it."""
    return {index for index in earlier_reasoning(turns) if template.writes_reasoning(turns[index])}
