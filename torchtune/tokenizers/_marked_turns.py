"""Base class of chat layouts with special tokens around turns."""

from collections.abc import Iterator, Sequence
from typing import ClassVar

from torchtune.data import DataError, Message, MessageLike, as_messages
from torchtune.tokenizers._protocols import end_tokens, text_only
from torchtune.tokenizers._turns import Part, Row, TurnsTokenizer


class MarkedTurnsTokenizer(TurnsTokenizer):
    """Base tokenizer for turns of the form ``header text end``, which a subclass defines.

    A subclass sets ``special_tokens``, ``bos_id``, ``eos_id`` and ``stop_tokens``.
    """

    roles: ClassVar[tuple[str, ...]] = ("system", "user", "assistant")
    bos_id: int | None

    def header(self, role: str) -> list[int]:
        """Return the token ids before the text of a turn."""
        raise NotImplementedError

    def body(self, text: str) -> list[int]:
        """Encode the text of a turn; special tokens in it are plain text."""
        raise NotImplementedError

    def turn_end(self) -> list[int]:
        """Return the token ids after the text of a turn."""
        raise NotImplementedError

    def opening(self) -> list[int]:
        """Return the token ids before the first turn."""
        return []

    def closing(self) -> list[int]:
        """Return the token ids after the last turn."""
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
    ) -> Row:
        """Tokenize a conversation.

        Args:
            messages: the conversation.
            add_end_tokens: end the last turn and the conversation; otherwise a last assistant turn stays open.
            ignore_system_prompt: omit system turns.
            add_eos: deprecated name of ``add_end_tokens``.

        Returns:
            token ids and mask (True = not trained on).

        Raises:
            DataError: the layout does not support the content or a role.
        """
        messages = as_messages(messages)
        if ignore_system_prompt:
            messages = [message for message in messages if message.role != "system"]
        return self._row(messages, end_tokens(add_end_tokens, add_eos))

    def _parts(self, messages: list[Message], closed: bool) -> Iterator[Part]:
        yield self.opening(), True
        for i, message in enumerate(messages):
            is_open = not closed and message.role == "assistant" and i == len(messages) - 1
            yield self._turn(message, is_open=is_open), message.masked
        if closed:
            yield self.closing(), True


def required_ids(special_tokens: dict[str, int], names: tuple[str, ...], family: str) -> list[int]:
    """Return the ids of the special tokens of a layout; raise :class:`DataError` if one is missing."""
    missing = [name for name in names if name not in special_tokens]
    if missing:
        raise DataError(f"special_tokens lacks {', '.join(missing)}, which {family}'s layout needs.")
    return [special_tokens[name] for name in names]
