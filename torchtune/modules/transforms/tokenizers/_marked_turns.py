"""Chat layouts with special tokens around turns."""

from collections.abc import Sequence
from typing import ClassVar

from torchtune.data import DataError, Message, MessageLike, PromptTemplateInterface, as_messages
from torchtune.data._truncate import truncate_row
from torchtune.modules.transforms.tokenizers._protocols import (
    MessageTransform,
    ModelTokenizer,
    end_tokens,
    text_only,
)


class MarkedTurnsTokenizer(MessageTransform, ModelTokenizer):
    """Conversations of turns that are each ``header text end``; a family says what these are.

    A family sets ``special_tokens``, ``bos_id``, ``eos_id``, ``max_seq_len``, ``prompt_template`` and
    ``truncation_type``.
    """

    roles: ClassVar[tuple[str, ...]] = ("system", "user", "assistant")
    bos_id: int | None
    eos_id: int
    prompt_template: PromptTemplateInterface | None
    truncation_type: str

    def header(self, role: str) -> list[int]:
        """Token ids before the text of a turn."""
        raise NotImplementedError

    def body(self, text: str) -> list[int]:
        """Token ids of the text of a turn; special tokens in it are plain text."""
        raise NotImplementedError

    def turn_end(self) -> list[int]:
        """Token ids after the text of a turn."""
        raise NotImplementedError

    def opening(self) -> list[int]:
        """Token ids before the first turn."""
        return []

    def closing(self) -> list[int]:
        """Token ids after the last turn."""
        return []

    def _turn(self, message: Message, *, is_open: bool) -> list[int]:
        name = type(self).__name__
        if message.role not in self.roles:
            raise DataError(f"{name} has no layout for a turn of '{message.role}', only for {', '.join(self.roles)}.")
        ids = self.header(message.role) + self.body(text_only(message, name))
        return ids if is_open else ids + self.turn_end()

    def tokenize_messages(
        self,
        messages: Sequence[MessageLike],
        *,
        add_end_tokens: bool = True,
        ignore_system_prompt: bool = False,
        add_eos: bool | None = None,
    ) -> tuple[list[int], list[bool]]:
        """Tokenize a conversation.

        Args:
            messages: the conversation.
            add_end_tokens: end the last turn and the whole; otherwise a last turn of the assistant stays open.
            ignore_system_prompt: leave out system turns.
            add_eos: old spelling of ``add_end_tokens``.

        Returns:
            token ids, and for each whether it is masked (not trained on).

        Raises:
            DataError: the content or a role has no place in the layout.
        """
        closed = end_tokens(add_end_tokens, add_eos)
        messages = as_messages(messages)
        if ignore_system_prompt:
            messages = [message for message in messages if message.role != "system"]
        if self.prompt_template is not None:
            messages = self.prompt_template(messages, inference=not closed)
        tokens = self.opening()
        mask = [True] * len(tokens)
        for i, message in enumerate(messages):
            is_open = not closed and message.role == "assistant" and i == len(messages) - 1
            ids = self._turn(message, is_open=is_open)
            tokens += ids
            mask += [message.masked] * len(ids)
            if self.truncation_type == "right" and self.max_seq_len and len(tokens) > self.max_seq_len:
                break
        end = self.closing() if closed else []
        tokens, mask = tokens + end, mask + [True] * len(end)
        eos_id = self.eos_id if closed else None
        return truncate_row(tokens, mask, self.max_seq_len, self.truncation_type, eos_id, self.stop_tokens)


def required_ids(special_tokens: dict[str, int], names: tuple[str, ...], family: str) -> list[int]:
    """Ids of the special tokens that a layout needs. Raises :class:`DataError` where one is missing."""
    missing = [name for name in names if name not in special_tokens]
    if missing:
        raise DataError(f"special_tokens lacks {', '.join(missing)}, which {family}'s layout needs.")
    return [special_tokens[name] for name in names]
