"""Tokens between two assistant turns; sampled turns are not rendered again."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from torchtune.data import DataError, Message
from torchtune.rlhf._rollouts import RolloutError
from torchtune.rlhf.environments._tools import ToolCall, after_reasoning

# Texts of the short conversations that are rendered.
_QUESTION = Message(role="user", content="Question", masked=True)
_THOUGHT = "Thought"


@dataclass(frozen=True)
class Turn:
    """Assistant turn: sampled tokens, tool calls (none if the turn could not be parsed), and replies to the calls."""

    tokens: list[int]
    calls: Sequence[ToolCall]
    replies: Sequence[str]


class Bridge:
    """Tokens that a chat template writes between the end of an assistant turn and the start of the next.

    The sampled tokens of a conversation are kept, because decoding and rendering them again could change them. Only the
    replies are rendered, in a short conversation with calls of the same tools.

    Args:
        tokenizer: the model's tokenizer.
        tools: tool definitions of the environment.

    Example:
        >>> from torchtune.rlhf.environments import Bridge, ToolCall
        >>> bridge = Bridge(tokenizer, [])
        >>> tokenizer.decode(bridge([ToolCall("add")], ["3"]), skip_special_tokens=False)  # doctest: +SKIP
        '\\n<|im_start|>tool\\n3<|im_end|>\\n<|im_start|>assistant\\n'
    """

    def __init__(self, tokenizer: Any, tools: Sequence[Mapping[str, Any]]) -> None:
        self._tokenizer = tokenizer
        self._template_arguments = {}
        if tools and getattr(tokenizer, "takes_tools", False):
            self._template_arguments = {"tools": list(tools)}

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a conversation up to the assistant turn, including the tool definitions."""
        tokens, _ = self._tokenizer.tokenize_messages(messages, add_end_tokens=False, **self._template_arguments)
        return tokens

    def __call__(
        self, calls: Sequence[ToolCall], replies: Sequence[str], others: Sequence[Message] = (), *, closes: bool = False
    ) -> list[int]:
        """Return the tokens after an assistant turn, up to the next assistant turn.

        Args:
            calls: tool calls of the turn; empty for a turn that could not be parsed.
            replies: one text for each call, or one text for the whole turn.
            others: masked messages that follow the replies.
            closes: whether to begin with the token that ends the turn, for a turn that was truncated.

        Raises:
            RolloutError: the chat template does not write the replies.
        """
        try:
            *_, turn, following = self._render([_Sketch(calls, replies)], others)
        except DataError as error:
            raise RolloutError(f"environment: the chat template takes no replies of tools: {error}") from error
        if closes:
            return turn[-1:] + following
        return following

    def _render(self, turns: Sequence["_Sketch"], others: Sequence[Message] = ()) -> list[list[int]]:
        """Render a question, assistant turns with their replies, and other messages.

        Returns:
            The tokens before the first turn, of the first turn, between the first and the second turn, and so on.

        Raises:
            DataError: the chat template rejects the messages.
        """
        if not any(turn.calls for turn in turns):
            return self._split(_conversation(turns, others, with_calls=False))
        try:
            return self._split(_conversation(turns, others, with_calls=True))
        except DataError as error:
            try:  # for chat templates that do not support tool calls
                return self._split(_conversation(turns, others, with_calls=False))
            except DataError:
                raise error from None

    def _split(self, messages: list[Message]) -> list[list[int]]:
        """Return the tokens up to the next assistant turn, split at the start and the end of each labeled turn."""
        tokens, mask = self._tokenizer.tokenize_messages(messages, **self._template_arguments)
        labeled = [position for position, masked in enumerate(mask) if not masked]
        end = labeled[-1] + 1  # of the last turn
        conversation = self.prompt([*messages, Message(role="assistant", content="")])
        if conversation[:end] != tokens[:end]:
            raise DataError("it changes a turn that replies follow")
        segments = []
        start = 0
        for position in range(1, end):
            if mask[position] != mask[position - 1]:
                segments.append(conversation[start:position])
                start = position
        return [*segments, conversation[start:end], conversation[end:]]

    def context(self, prompt: Sequence[int], turns: Sequence[Turn]) -> list[int] | None:
        """Return a conversation up to the next turn, without the reasoning that the chat template omits.

        Args:
            prompt: tokens before the first turn.
            turns: assistant turns of the conversation.

        Returns:
            The tokens, or None if the chat template omits no reasoning.
        """
        if not self._may_omit_reasoning:
            return None
        texts = [self._tokenizer.decode(turn.tokens, skip_special_tokens=False) for turn in turns]
        sketches = []
        for turn, text in zip(turns, texts, strict=True):
            sketches.append(_Sketch(turn.calls, turn.replies, has_reasoning=after_reasoning(text) != text))
        # The reply to a turn without calls is a message of the user, before which a template may also omit the empty
        # reasoning that the prompt has opened.
        if turns[-1].calls and not any(sketch.has_reasoning for sketch in sketches):
            return None
        # The same conversation with short texts shows which reasoning the template omits.
        before_turns, *segments = self._render(sketches)
        rendered_turns = segments[::2]
        between_turns = segments[1::2]

        # The prompt may open the reasoning of the first turn, which the template may write differently by now: keep the
        # prompt up to the first difference.
        opening = self.prompt([_QUESTION])
        num_equal = _common_prefix(opening, before_turns)
        num_kept = len(prompt) - len(opening) + num_equal
        tokens = [*prompt[:num_kept], *before_turns[num_equal:]]
        for i, turn in enumerate(turns):
            rendered = self._tokenizer.decode(rendered_turns[i], skip_special_tokens=False)
            if sketches[i].has_reasoning and _THOUGHT not in rendered:
                # The template's tokens around the answer, which may be an empty block of reasoning and the stop token.
                rendered_answer = self._last_tokens(rendered_turns[i], after_reasoning(rendered))
                sampled_answer = self._last_tokens(turn.tokens, after_reasoning(texts[i]))
                num_before_answer = len(rendered_turns[i]) - len(rendered_answer)
                tokens += rendered_turns[i][:num_before_answer]
                tokens += sampled_answer[:-1]
                tokens += rendered_answer[-1:]
            else:
                tokens += turn.tokens
            tokens += between_turns[i]
        return tokens

    @cached_property
    def _may_omit_reasoning(self) -> bool:
        """Whether the chat template writes the reasoning of a turn, but may omit it from earlier turns."""
        if getattr(self._tokenizer, "reasoning", "keep") == "keep":
            return False
        answer = _Sketch([], [], has_reasoning=True)
        tool_use = _Sketch([ToolCall("f")], ["Result"], has_reasoning=True)
        for turn in (answer, tool_use):
            with suppress(DataError):  # a template may support only one of them
                segments = self._render([turn])
                if _THOUGHT in self._tokenizer.decode(list(chain.from_iterable(segments))):
                    return True
        return False

    def _last_tokens(self, tokens: list[int], text: str) -> list[int]:
        """Return the last tokens, which decode to ``text``."""

        def text_length(count: int) -> int:
            return len(self._tokenizer.decode(tokens[:count], skip_special_tokens=False))

        num_before = text_length(len(tokens)) - len(text)  # characters before ``text``
        return tokens[bisect_left(range(len(tokens)), num_before, key=text_length) :]


@dataclass(frozen=True)
class _Sketch:
    """Assistant turn with short texts in place of the sampled ones: its calls, the replies, and whether it reasons."""

    calls: Sequence[ToolCall]
    replies: Sequence[str]
    has_reasoning: bool = False


def _common_prefix(tokens: Sequence[int], other_tokens: Sequence[int]) -> int:
    """Return the number of equal tokens at the start of two sequences."""
    count = 0
    for token, other_token in zip(tokens, other_tokens, strict=False):
        if token != other_token:
            break
        count += 1
    return count


def _conversation(turns: Sequence[_Sketch], others: Sequence[Message], *, with_calls: bool) -> list[Message]:
    """Return a question, assistant turns with the replies to them, and other messages; only the turns have labels.

    The turns are short, because only the tokens between and around them are used.

    Without ``with_calls``, turns that call tools are texts, for chat templates that do not support tool calls.
    """
    messages = [_QUESTION]
    for turn in turns:
        reasoning = {}
        if turn.has_reasoning:
            reasoning = {"reasoning_content": _THOUGHT}
        if not turn.calls:
            messages.append(Message(role="assistant", content="Answer", extra=reasoning))
            for reply in turn.replies:
                messages.append(Message(role="user", content=reply, masked=True))
            continue
        tool_calls = []
        results = []
        for number, (call, reply) in enumerate(zip(turn.calls, turn.replies, strict=True)):
            call_id = f"call{number:05d}"  # nine letters and digits, as Mistral's templates require
            function = {"name": call.name, "arguments": {}}
            tool_calls.append({"type": "function", "id": call_id, "function": function})
            extra = {"tool_call_id": call_id, "name": call.name}
            results.append(Message(role="tool", content=reply, masked=True, extra=extra))
        if with_calls:
            extra = {"tool_calls": tool_calls, **reasoning}
            messages.append(Message(role="assistant", content="", extra=extra))
        else:
            messages.append(Message(role="assistant", content="Answer", extra=reasoning))
        messages += results
    return [*messages, *others]
