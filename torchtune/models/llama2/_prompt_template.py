"""Llama 2's prompt template."""

from collections.abc import Sequence
from typing import Any, ClassVar

from torchtune.data import Message, MessageLike, PromptTemplateInterface, Role, as_messages, with_tags


class Llama2ChatTemplate(PromptTemplateInterface):
    """``[INST] <<SYS>>\\n{system}\\n<</SYS>>\\n\\n{user} [/INST] {assistant}``.

    The system message is part of the next user turn.
    """

    template: ClassVar[dict[Role, tuple[str, str]]] = {
        "system": ("<<SYS>>\n", "\n<</SYS>>\n\n"),
        "user": ("[INST] ", " [/INST] "),
        "assistant": ("", ""),
        "ipython": ("", ""),
    }

    def __call__(self, messages: Sequence[MessageLike], inference: bool = False) -> list[Message]:
        """Apply the template to messages; system messages are merged into the next user turn."""
        system: list[dict[str, Any]] = []
        formatted = []
        for message in as_messages(messages):
            if message.role == "system":
                system = with_tags(message, *self.template["system"]).content
                continue
            if message.role == "user":
                content, system = [*system, *message.content], []
                message = Message(role="user", content=content, masked=message.masked, eot=message.eot)
            formatted.append(with_tags(message, *self.template.get(message.role, ("", ""))))
        return formatted
