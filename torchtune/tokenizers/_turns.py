"""Base class of chat layouts that are written turn by turn."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from torchtune.data import Message, MessageLike, PromptTemplateInterface, as_messages, truncate_row
from torchtune.tokenizers._protocols import MessageTransform, ModelTokenizer, end_tokens
from torchtune.tokenizers._tokenizer_files import SavesPublishedFiles

Row = tuple[list[int], list[bool]]
# (token ids, masked)
Part = tuple[list[int], bool]


class TurnsTokenizer(MessageTransform, SavesPublishedFiles, ModelTokenizer):
    """Base tokenizer for conversations, in a layout that a subclass defines by :meth:`_parts`.

    Args:
        max_seq_len: maximum row length in tokens; ``None`` disables truncation.
        prompt_template: texts added to the turns before the layout is applied.
        truncation_type: ``"right"`` cuts the end of a long row, ``"left"`` the beginning.
    """

    eos_id: int
    stop_tokens: list[int]
    turn_ends: Sequence[int] = ()  # end-of-turn tokens other than `stop_tokens`

    def __init__(
        self, max_seq_len: int | None, prompt_template: PromptTemplateInterface | None, truncation_type: str
    ) -> None:
        self.max_seq_len = max_seq_len
        self.prompt_template = prompt_template
        self.truncation_type = truncation_type

    def _parts(self, messages: list[Message], closed: bool) -> Iterable[Part]:
        """Yield the parts of a conversation; ``closed``: end the last turn and the conversation."""
        raise NotImplementedError

    def tokenize_messages(
        self, messages: Sequence[MessageLike], *, add_end_tokens: bool = True, add_eos: bool | None = None
    ) -> Row:
        """Tokenize a conversation.

        Args:
            messages: the conversation.
            add_end_tokens: end the last turn and the conversation; otherwise the model continues the last turn.
            add_eos: deprecated name of ``add_end_tokens``.

        Returns:
            token ids and mask (True = not trained on).

        Raises:
            DataError: the layout does not support the content.
        """
        closed = end_tokens(add_end_tokens, add_eos)
        return self._row(as_messages(messages), closed)

    def _row(self, messages: list[Message], closed: bool, **options: Any) -> Row:
        """Tokenize a conversation; ``options`` are further arguments of :meth:`_parts`."""
        if self.prompt_template is not None:
            messages = self.prompt_template(messages, inference=not closed)
        parts, eos_id = self._parts(messages, closed, **options), self.eos_id if closed else None
        ends = [*self.stop_tokens, *self.turn_ends]
        return joined_row(parts, self.max_seq_len, self.truncation_type, eos_id, ends)


def joined_row(
    parts: Iterable[Part],
    max_seq_len: int | None,
    truncation_type: str,
    eos_id: int | None,
    stop_ids: Collection[int],
) -> Row:
    """Join parts to a row, and truncate it like :func:`torchtune.data.truncate_row`; read no parts beyond the limit."""
    tokens: list[int] = []
    mask: list[bool] = []
    for ids, masked in parts:
        tokens += ids
        mask += [masked] * len(ids)
        if truncation_type == "right" and max_seq_len and len(tokens) > max_seq_len:
            break
    return truncate_row(tokens, mask, max_seq_len, truncation_type, eos_id, stop_ids)


def decode_around(
    token_ids: Iterable[int], special_texts: Mapping[int, str], decode: Callable[[list[int]], str], *, skip: bool
) -> str:
    """Decode the ids between special tokens with ``decode``; ``skip`` omits the special tokens."""
    texts: list[str] = []
    plain: list[int] = []
    for token_id in token_ids:
        if token_id not in special_texts:
            plain.append(token_id)
            continue
        if plain:
            texts.append(decode(plain))
            plain = []
        if not skip:
            texts.append(special_texts[token_id])
    return "".join([*texts, decode(plain)] if plain else texts)
