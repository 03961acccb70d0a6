"""Gemma's prompt template."""

from collections.abc import Sequence
from typing import ClassVar

from torchtune.data import DataError, Message, MessageLike, PromptTemplateInterface, Role, as_messages


class GemmaChatTemplate(PromptTemplateInterface):
    """``<start_of_turn>user\\n{text}<end_of_turn>\\n<start_of_turn>model\\n{text}<end_of_turn>\\n``.

    White space around a text is stripped. System messages are prepended to the next user turn, as in Gemma 3. The row
    has one beginning-of-sequence token and ends with its last turn.
    """

    template: ClassVar[dict[Role, tuple[str, str]]] = {
        "user": ("<start_of_turn>user\n", "<end_of_turn>\n"),
        "assistant": ("<start_of_turn>model\n", "<end_of_turn>\n"),
    }
    end_of_turn: ClassVar[str] = "<end_of_turn>"

    def __call__(self, messages: Sequence[MessageLike], inference: bool = False) -> list[Message]:
        """Apply the template to messages; system messages are merged into the next user turn.

        With ``inference`` a final assistant turn stays open.

        Raises:
            DataError: a role is not ``system``, ``user`` or ``assistant``, or a message has an image.
        """
        system: list[str] = []
        formatted, messages = [], as_messages(messages)
        for i, message in enumerate(messages):
            if message.contains_media or message.role not in ("system", *self.template):
                what = "an image" if message.contains_media else f"a turn of '{message.role}'"
                raise DataError(f"Gemma's layout has no place for {what}.")
            texts = [item["content"] for item in message.content]
            if message.role == "system":
                system = _joined(texts, ["\n\n"])
                continue
            is_open = inference and message.role == "assistant" and i == len(messages) - 1
            before, after = self.template[message.role]
            if message.role == "user":
                texts, system = _joined(system, _stripped(texts)), []
            else:
                texts = _stripped(texts)
            texts = _joined([before], texts, [] if is_open else [after])
            content = [{"type": "text", "content": text} for text in texts]
            formatted.append(Message(role=message.role, content=content, masked=message.masked))
        return formatted


def _stripped(texts: list[str]) -> list[str]:
    """Strip white space at the beginning and end of a text in parts."""
    while texts and not texts[0].strip():
        texts = texts[1:]
    while texts and not texts[-1].strip():
        texts = texts[:-1]
    if not texts:
        return []
    texts = [texts[0].lstrip(), *texts[1:]]
    return [*texts[:-1], texts[-1].rstrip()]


def _joined(*lists: list[str]) -> list[str]:
    """Concatenate lists of parts; adjacent parts of two lists are joined, so that they are tokenized as one text."""
    joined: list[str] = []
    for parts in lists:
        joined = [*joined[:-1], joined[-1] + parts[0], *parts[1:]] if joined and parts else [*joined, *parts]
    return joined
