"""Templates: fixed text before and after a turn, independent of the tokenizer, and around a query and a document."""

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol

from torchtune._lazy import former_names
from torchtune.data._messages import Message, MessageLike, Role, as_messages
from torchtune.data._rows import DataError

TemplateType = str | Mapping[Role, tuple[str, str]]
RERANKER_FILE = "reranker_config.json"  # file of a checkpoint with the template of a reranker
DEFAULT_PAIR_TEMPLATE = "Query: {query}\nDocument: {document}"
_PLACEHOLDER = re.compile(r"\{query\}|\{document\}")


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

        return locate(prompt_template)()  # a class, or a function that builds the template
    if isinstance(prompt_template, Mapping):
        for role, tags in prompt_template.items():
            # A text of two characters has two elements that are texts, too.
            if isinstance(tags, str) or len(tags) != 2 or not all(isinstance(tag, str) for tag in tags):
                raise DataError(f"prompt_template: '{role}' needs two texts, before and after the turn, not {tags!r}.")
        return PromptTemplate(prompt_template)
    if callable(prompt_template):
        return prompt_template
    raise DataError(
        f"prompt_template must be a dotted path or a mapping role -> [before, after], not {prompt_template!r}."
    )


@dataclass(frozen=True)
class PairTemplate:
    """Template that puts a query and a document into one sequence, whose last token a reranker scores.

    Args:
        text: text with ``{query}`` and ``{document}``. Control tokens of the tokenizer in it are control tokens; in
            queries and documents they are plain text.
        add_eos: end the sequence with the EOS token.

    Raises:
        DataError: ``text`` does not have ``{query}`` and ``{document}`` once each.

    Example:
        >>> template = torchtune.data.PairTemplate("{query}: {document}")
        >>> tokenizer.decode(template.tokens(tokenizer, "who sees", "the cat"))
        'who sees: the cat'
    """

    text: str = DEFAULT_PAIR_TEMPLATE
    add_eos: bool = False

    def __post_init__(self) -> None:
        for name in ("{query}", "{document}"):
            count = self.text.count(name)
            if count != 1:
                raise DataError(f"template: '{name}' must be in it once, not {count} times: {self.text!r}.")

    def tokens(self, tokenizer: Any, query: str, document: str, max_seq_len: int | None = None) -> list[int]:
        """Return the token ids of a pair; too long ones are cut before the end of the template.

        Args:
            tokenizer: tokenizer of the model.
            query: the query.
            document: the document.
            max_seq_len: maximum number of tokens; by default there is none.
        """
        tokens = self._encode(tokenizer, self.text, {"{query}": query, "{document}": document})
        if max_seq_len is None or len(tokens) <= max_seq_len:
            return tokens
        # The score is read at the end of the template, which stays where it is tokens of its own.
        *_, text_behind = _PLACEHOLDER.split(self.text)
        end = self._encode(tokenizer, text_behind, {}, is_end=True)
        if not end or tokens[-len(end) :] != end or len(end) >= max_seq_len:
            return tokens[:max_seq_len]
        return tokens[: max_seq_len - len(end)] + end

    def _encode(self, tokenizer: Any, text: str, values: dict[str, str], *, is_end: bool = False) -> list[int]:
        """Return the token ids of the template, or of its end, with the values of the placeholders."""
        # Control tokens in a text are plain text; tokenizers without `encode_text` never parse them.
        encode = getattr(tokenizer, "encode_text", tokenizer.encode)
        control_tokens = getattr(tokenizer, "special_tokens", {})
        pieces = [text]
        if control_tokens:  # split the template before its placeholders are filled: the values have none
            # The longest first, because a control token may begin with another one.
            longest_first = sorted(control_tokens, key=len, reverse=True)
            any_control_token = "|".join(map(re.escape, longest_first))
            pieces = re.split(f"({any_control_token})", text)
        tokens: list[int] = []
        for index, piece in enumerate(pieces):
            is_start = index == 0 and not is_end
            if piece in control_tokens:
                tokens.append(control_tokens[piece])
            elif piece or is_start:  # before a control token the first piece is empty, but has the BOS token
                filled = _PLACEHOLDER.sub(lambda match: values[match[0]], piece)
                tokens += encode(text=filled, add_bos=is_start, add_eos=False)
        if self.add_eos:
            tokens.append(tokenizer.eos_id)
        return tokens

    def chat_template(self, tokenizer: Any) -> str:
        """Return a Jinja template that renders messages of the roles ``query`` and ``document`` to the same sequence.

        This is how ``CrossEncoder`` of ``sentence-transformers`` renders a pair.
        """
        text_of_id = {token: text for text, token in getattr(tokenizer, "special_tokens", {}).items()}
        start = list(tokenizer.encode("", add_bos=True, add_eos=False))
        pieces = [_literal("".join(text_of_id.get(token, "") for token in start))]
        position = 0
        for match in _PLACEHOLDER.finditer(self.text):
            role = match[0].strip("{}")
            pieces.append(_literal(self.text[position : match.start()]))
            pieces.append(f"{{% for message in messages if message['role'] == '{role}' %}}")
            pieces.append("{{ message['content'] }}{% endfor %}")
            position = match.end()
        end = self.text[position:]
        if self.add_eos:
            end += text_of_id.get(tokenizer.eos_id, "")
        return "".join([*pieces, _literal(end)])


def _literal(text: str) -> str:
    """Return Jinja that renders to a text."""
    if not text:
        return ""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    escaped = escaped.replace("\n", "\\n").replace("\r", "\\r")  # Jinja changes line ends
    return f"{{{{ '{escaped}' }}}}"


__getattr__ = former_names(__name__)
