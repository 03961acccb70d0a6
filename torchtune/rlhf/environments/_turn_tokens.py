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
from torchtune.rlhf.environments._tool_call_parsers import ToolCall, after_reasoning

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
        self._options = {"tools": list(tools)} if tools and getattr(tokenizer, "takes_tools", False) else {}

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a conversation up to the assistant turn, including the tool definitions."""
        return self._tokenizer.tokenize_messages(messages, add_end_tokens=False, **self._options)[0]

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
            *_, turn, after = self._pieces([(calls, replies, False)], others)
        except DataError as error:
            raise RolloutError(f"environment: the chat template takes no replies of tools: {error}") from error
        return turn[-1:] + after if closes else after

    def _pieces(
        self, turns: Sequence[tuple[Sequence[ToolCall], Sequence[str], bool]], others: Sequence[Message] = ()
    ) -> list[list[int]]:
        """Render a question, assistant turns (calls, replies, whether the turn has reasoning), and other messages.

        Returns:
            The tokens before the first turn, of the first turn, between the first and the second turn, and so on.
        """
        errors = []
        for has_calls in (True, False) if any(calls for calls, _, _ in turns) else (False,):
            messages = [_turns(calls, replies, has_calls, thinks) for calls, replies, thinks in turns]
            try:
                return self._split([messages[0][0], *chain.from_iterable(one[1:] for one in messages), *others])
            except DataError as error:
                errors.append(error)
        raise errors[0]

    def _split(self, messages: list[Message]) -> list[list[int]]:
        """Return the tokens up to the next assistant turn, split at the start and the end of each labeled turn."""
        tokens, mask = self._tokenizer.tokenize_messages(messages, **self._options)
        end = max(place for place, masked in enumerate(mask) if not masked) + 1
        whole = self.prompt([*messages, Message(role="assistant", content="")])
        if whole[:end] != tokens[:end]:
            raise DataError("it changes a turn that replies follow")
        edges = [0, *(place for place in range(1, end) if mask[place] != mask[place - 1]), end]
        return [whole[start:stop] for start, stop in zip(edges, [*edges[1:], len(whole)], strict=True)]

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
        thinks = [after_reasoning(text) != text for text in texts]
        if turns[-1].calls and not any(thinks):
            return None
        asked = [(turn.calls, turn.replies, one) for turn, one in zip(turns, thinks, strict=True)]
        first, *pieces = self._pieces(asked)
        opening = self.prompt([_QUESTION])  # the prompt may open the reasoning of the first turn
        same = min(len(opening), len(first))
        same = next((place for place in range(same) if opening[place] != first[place]), same)
        tokens = [*prompt[: len(prompt) - len(opening) + same], *first[same:]]
        for turn, text, thought, written, between in zip(turns, texts, thinks, pieces[::2], pieces[1::2], strict=True):
            rendered = self._tokenizer.decode(written, skip_special_tokens=False)
            if thought and _THOUGHT not in rendered:
                answer = self._last(written, after_reasoning(rendered))
                tokens += written[: len(written) - len(answer)] + self._last(turn.tokens, after_reasoning(text))[:-1]
                tokens += answer[-1:]
            else:
                tokens += turn.tokens
            tokens += between
        return tokens

    @cached_property
    def _may_omit_reasoning(self) -> bool:
        """Whether the chat template writes the reasoning of a turn, but may omit it from earlier turns."""
        if getattr(self._tokenizer, "reasoning", "keep") == "keep":
            return False
        for calls, replies in (([], []), ([ToolCall("f")], ["Result"])):
            with suppress(DataError):
                pieces = self._pieces([(calls, replies, True)])
                if _THOUGHT in self._tokenizer.decode(list(chain.from_iterable(pieces))):
                    return True
        return False

    def _last(self, tokens: list[int], text: str) -> list[int]:
        """Return the last tokens, which decode to ``text``."""

        def length(count: int) -> int:
            return len(self._tokenizer.decode(tokens[:count], skip_special_tokens=False))

        return tokens[bisect_left(range(len(tokens)), length(len(tokens)) - len(text), key=length) :]


def _turns(calls: Sequence[ToolCall], replies: Sequence[str], has_calls: bool, thinks: bool = False) -> list[Message]:
    """Return a question, an assistant turn, and the replies to the turn; only the assistant turn has labels.

    Without ``has_calls``, the turn is a text, for chat templates that do not support tool calls.
    """
    thought = {"reasoning_content": _THOUGHT} if thinks else {}
    if not calls:
        answer = Message(role="assistant", content="Answer", extra=thought)
        return [_QUESTION, answer, *(Message(role="user", content=reply, masked=True) for reply in replies)]
    ids = [f"call{number:05d}" for number in range(len(calls))]
    called = [
        {"type": "function", "id": one, "function": {"name": call.name, "arguments": {}}}
        for one, call in zip(ids, calls, strict=True)
    ]
    answer = (
        Message(role="assistant", content="", extra={"tool_calls": called, **thought})
        if has_calls
        else Message(role="assistant", content="Answer", extra=thought)
    )
    results = [
        Message(role="tool", content=reply, masked=True, extra={"tool_call_id": one, "name": call.name})
        for one, call, reply in zip(ids, calls, replies, strict=True)
    ]
    return [_QUESTION, answer, *results]
