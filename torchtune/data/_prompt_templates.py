"""Texts put before and after a turn: layouts that are part of the data, not of the tokenizer."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ClassVar, Protocol

from torchtune.data._common import DataError
from torchtune.data._messages import Message, MessageLike, Role, as_messages

TemplateType = str | Mapping[Role, tuple[str, str]]


class PromptTemplateInterface(Protocol):
    """Adds a layout to messages; ``template`` maps a role to the texts before and after its turn."""

    template: dict[Role, tuple[str, str]]

    def __call__(self, messages: Sequence[MessageLike], inference: bool = False) -> list[Message]:
        """The messages with the layout added to their content."""
        ...


def with_tags(message: Message, before: str, after: str) -> Message:
    """A copy of ``message`` with texts around its content, as content items of their own."""
    content = [
        *([{"type": "text", "content": before}] if before else []),
        *message.content,
        *([{"type": "text", "content": after}] if after else []),
    ]
    return Message(
        role=message.role,
        content=content,
        masked=message.masked,
        ipython=message.ipython,
        eot=message.eot,
        extra=message.extra,
    )


class PromptTemplate(PromptTemplateInterface):
    """Puts fixed texts before and after the turns of a role; roles that are not in ``template`` stay as they are.

    Args:
        template: role -> (text before, text after).
    """

    def __init__(self, template: Mapping[Role, tuple[str, str]]) -> None:
        self.template = {role: (before, after) for role, (before, after) in template.items()}

    def __call__(self, messages: Sequence[MessageLike], inference: bool = False) -> list[Message]:
        """The messages with the texts added."""
        turns = as_messages(messages)
        return [with_tags(message, *self.template.get(message.role, ("", ""))) for message in turns]


class ChatMLTemplate(PromptTemplateInterface):
    """``<|im_start|>{role}\\n{text}<|im_end|>\\n`` around the turns of system, user and assistant.

    A final empty turn of the assistant stays open, so that a model can continue it.
    """

    template: ClassVar[dict[Role, tuple[str, str]]] = {
        "system": ("<|im_start|>system\n", "<|im_end|>\n"),
        "user": ("<|im_start|>user\n", "<|im_end|>\n"),
        "assistant": ("<|im_start|>assistant\n", "<|im_end|>\n"),
        "ipython": ("", ""),
    }

    def __call__(self, messages: Sequence[MessageLike], inference: bool = False) -> list[Message]:
        """The messages with the layout added."""
        formatted, messages = [], as_messages(messages)
        for i, message in enumerate(messages):
            before, after = self.template.get(message.role, ("", ""))
            is_open = message.role == "assistant" and i == len(messages) - 1 and not message.text_content
            formatted.append(with_tags(message, before, "" if is_open else after))
        return formatted


GrammarErrorCorrectionTemplate = partial(
    PromptTemplate, template={"user": ("Correct this to standard English: ", "\n---\nCorrected: ")}
)
SummarizeTemplate = partial(PromptTemplate, template={"user": ("Summarize this dialogue:\n", "\n---\nSummary:\n")})
QuestionAnswerTemplate = partial(PromptTemplate, template={"user": ("Question: ", "\n\nAnswer: ")})


def get_prompt_template(
    prompt_template: TemplateType | PromptTemplateInterface | None, locate: Callable[[str], Callable] | None = None
) -> PromptTemplateInterface | None:
    """The template that a setting means: a dotted path, a mapping role -> (before, after), or a template itself.

    Args:
        prompt_template: the setting; ``None`` gives ``None``.
        locate: resolves a dotted path; by default ``torchtune.config``'s.

    Raises:
        DataError: the mapping's values are not pairs of texts, or the setting is of another type.
    """
    if prompt_template is None:
        return None
    if isinstance(prompt_template, str):
        if locate is None:
            from torchtune.config._locate import locate
        return locate(prompt_template)()
    if isinstance(prompt_template, Mapping):
        for role, tags in prompt_template.items():
            if isinstance(tags, str) or len(tags) != 2 or not all(isinstance(tag, str) for tag in tags):
                raise DataError(f"prompt_template: '{role}' needs two texts, before and after the turn, not {tags!r}.")
        return PromptTemplate(prompt_template)
    if callable(prompt_template):
        return prompt_template
    raise DataError(
        f"prompt_template must be a dotted path or a mapping role -> [before, after], not {prompt_template!r}."
    )
