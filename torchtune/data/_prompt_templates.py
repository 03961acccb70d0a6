"""Prompt templates: fixed text before and after a turn, independent of the tokenizer."""

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar, Protocol

from torchtune._lazy import former_names
from torchtune.data._messages import Message, MessageLike, Role, as_messages
from torchtune.data._rows import DataError

TemplateType = str | Mapping[Role, tuple[str, str]]


class PromptTemplateInterface(Protocol):
    """Callable that adds fixed text to messages; ``template`` maps a role to the text before and after its turns."""

    template: dict[Role, tuple[str, str]]

    def __call__(self, messages: Sequence[MessageLike], inference: bool = False) -> list[Message]:
        """Return the messages with text added to their content."""
        ...


def with_tags(message: Message, before: str, after: str) -> Message:
    """Return a copy of ``message`` with text before and after its content, as separate content items."""
    content = list(message.content)
    if before:
        content.insert(0, {"type": "text", "content": before})
    if after:
        content.append({"type": "text", "content": after})
    tagged = copy.copy(message)
    tagged.content = content
    return tagged


class PromptTemplate(PromptTemplateInterface):
    """Prompt template that adds fixed text before and after the turns of each role in ``template``.

    Args:
        template: maps a role to (text before, text after).

    Example:
        >>> template = torchtune.data.PromptTemplate({"user": ("Q: ", "\\n"), "assistant": ("A: ", "")})
        >>> template([torchtune.data.Message(role="user", content="Why?")])[0].text_content
        'Q: Why?\\n'
    """

    def __init__(self, template: Mapping[Role, tuple[str, str]]) -> None:
        self.template = {role: (before, after) for role, (before, after) in template.items()}

    def __call__(self, messages: Sequence[MessageLike], inference: bool = False) -> list[Message]:
        """Return the messages with text added."""
        formatted = []
        for message in as_messages(messages):
            before, after = self.template.get(message.role, ("", ""))
            formatted.append(with_tags(message, before, after))
        return formatted


class ChatMLTemplate(PromptTemplateInterface):
    """Prompt template with ``<|im_start|>{role}\\n{text}<|im_end|>\\n`` for system, user and assistant turns.

    A final empty assistant turn has no ``<|im_end|>``, so that a model can continue it.

    Example:
        >>> turns = torchtune.data.ChatMLTemplate()([torchtune.data.Message(role="user", content="Why?")])
        >>> turns[0].text_content
        '<|im_start|>user\\nWhy?<|im_end|>\\n'
    """

    template: ClassVar[dict[Role, tuple[str, str]]] = {
        "system": ("<|im_start|>system\n", "<|im_end|>\n"),
        "user": ("<|im_start|>user\n", "<|im_end|>\n"),
        "assistant": ("<|im_start|>assistant\n", "<|im_end|>\n"),
        "ipython": ("", ""),
    }

    def __call__(self, messages: Sequence[MessageLike], inference: bool = False) -> list[Message]:
        """Return the messages with text added."""
        turns = as_messages(messages)
        formatted = []
        for i, message in enumerate(turns):
            before, after = self.template.get(message.role, ("", ""))
            is_open = message.role == "assistant" and i == len(turns) - 1 and not message.text_content
            if is_open:  # the model goes on from here
                after = ""
            formatted.append(with_tags(message, before, after))
        return formatted


GrammarErrorCorrectionTemplate = partial(
    PromptTemplate, template={"user": ("Correct this to standard English: ", "\n---\nCorrected: ")}
)
SummarizeTemplate = partial(PromptTemplate, template={"user": ("Summarize this dialogue:\n", "\n---\nSummary:\n")})
QuestionAnswerTemplate = partial(PromptTemplate, template={"user": ("Question: ", "\n\nAnswer: ")})


def get_prompt_template(
    prompt_template: TemplateType | PromptTemplateInterface | None,
) -> PromptTemplateInterface | None:
    """Build a prompt template from a dotted path, a mapping from role to (text before, text after), or a template.

    Args:
        prompt_template: the setting; ``None`` returns ``None``.

    Raises:
        DataError: a value of the mapping is not a pair of texts, or the setting has another type.
    """
    if prompt_template is None:
        return None
    if isinstance(prompt_template, str):
        from torchtune.config import locate

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


__getattr__ = former_names(__name__)
