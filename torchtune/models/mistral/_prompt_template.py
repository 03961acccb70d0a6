"""Mistral's prompt template."""

from collections.abc import Sequence
from typing import ClassVar

from torchtune.data import DataError, Message, MessageLike, PromptTemplateInterface, Role, as_messages, with_tags


class MistralChatTemplate(PromptTemplateInterface):
    """``[INST] {user} [/INST] {assistant}``, without system messages."""

    template: ClassVar[dict[Role, tuple[str, str]]] = {
        "user": ("[INST] ", " [/INST] "),
        "assistant": ("", ""),
        "ipython": ("", ""),
    }

    def __call__(self, messages: Sequence[MessageLike], inference: bool = False) -> list[Message]:
        """Apply the template to messages. Raises :class:`DataError` for a system message."""
        messages = as_messages(messages)
        if any(message.role == "system" for message in messages):
            raise DataError(
                "Mistral's layout has no system turn: put its text into the first user turn, or leave it out."
            )
        return [with_tags(message, *self.template.get(message.role, ("", ""))) for message in messages]
