"""Tokens between two turns of the assistant, without rendering what was sampled a second time."""

from collections.abc import Mapping, Sequence
from typing import Any

from torchtune.data import DataError, Message
from torchtune.rlhf._rollouts import RolloutError
from torchtune.rlhf.environments._calls import ToolCall


class Bridge:
    """Tokens that a chat template puts between the end of an assistant's turn and the start of the next.

    The sampled tokens of a conversation stay as they are: decoding and rendering them again could change the tokens,
    and drop the reasoning of earlier turns. Only the replies are rendered, in a short conversation with a call of the
    same tools.

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
        """Return the tokens of a conversation up to the assistant's turn, with the tools' definitions."""
        return self._tokenizer.tokenize_messages(messages, add_end_tokens=False, **self._options)[0]

    def __call__(
        self, calls: Sequence[ToolCall], replies: Sequence[str], others: Sequence[Message] = (), *, closes: bool = False
    ) -> list[int]:
        """Return the tokens after an assistant's turn, up to the next one.

        Args:
            calls: calls of the turn; none for a turn that could not be parsed.
            replies: a text for each call, or one that answers the whole turn.
            others: masked messages that follow the replies.
            closes: begin with the token that ends the assistant's turn, for a turn that was truncated.

        Raises:
            RolloutError: the chat template has no place for the replies.
        """
        errors = []
        for has_calls in (True, False) if calls else (False,):
            try:
                return self._between([*_turns(calls, replies, has_calls), *others], closes)
            except DataError as error:
                errors.append(str(error))
        raise RolloutError(f"environment: the chat template takes no replies of tools: {errors[0]}")

    def _between(self, turns: list[Message], closes: bool) -> list[int]:
        tokens, mask = self._tokenizer.tokenize_messages(turns, **self._options)
        end = max(place for place, masked in enumerate(mask) if not masked) + 1
        whole = self.prompt([*turns, Message(role="assistant", content="")])
        if whole[:end] != tokens[:end]:
            raise DataError("it changes a turn that replies follow")
        return whole[end - closes :]


def _turns(calls: Sequence[ToolCall], replies: Sequence[str], has_calls: bool) -> list[Message]:
    """Return a question, an assistant's turn, the only one with labels, and replies to it.

    Without ``has_calls``, the turn is a text, for templates that know no calls.
    """
    user = Message(role="user", content="Question", masked=True)
    if not calls:
        answer = Message(role="assistant", content="Answer")
        return [user, answer, *(Message(role="user", content=reply, masked=True) for reply in replies)]
    ids = [f"call{number:05d}" for number in range(len(calls))]
    called = [
        {"type": "function", "id": one, "function": {"name": call.name, "arguments": {}}}
        for one, call in zip(ids, calls, strict=True)
    ]
    answer = (
        Message(role="assistant", content="", extra={"tool_calls": called})
        if has_calls
        else Message(role="assistant", content="Answer")
    )
    results = [
        Message(role="tool", content=reply, masked=True, extra={"tool_call_id": one, "name": call.name})
        for one, call, reply in zip(ids, calls, replies, strict=True)
    ]
    return [user, answer, *results]
