"""Chat layouts that are written turn by turn: base classes, and conversations in plain text.

The tokenizers of the families keep their layouts, and are not chat templates by another name: they read vocabularies
without a ``tokenizer.json``, take prompt templates, and train on whole turns, with the header before the text. Chat
templates train on what the model generates, so that their masks differ.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, ClassVar

from torchtune.data import (
    DataError,
    Message,
    MessageLike,
    PromptTemplateInterface,
    as_messages,
    truncate_row,
)
from torchtune.tokenizers._files import SavesPublishedFiles
from torchtune.tokenizers._protocols import MessageTransform, ModelTokenizer, adds_end_tokens, text_only

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
        closed = adds_end_tokens(add_end_tokens, add_eos)
        return self._row(as_messages(messages), closed)

    def _row(self, messages: list[Message], closed: bool, **options: Any) -> Row:
        """Tokenize a conversation; ``options`` are further arguments of :meth:`_parts`."""
        _refuse_untrained_parts(messages, type(self).__name__)
        if self.prompt_template is not None:
            messages = self.prompt_template(messages, inference=not closed)
        parts = self._parts(messages, closed, **options)
        eos_id = None
        if closed:  # a row that is cut ends with it; an open one goes on
            eos_id = self.eos_id
        turn_end_ids = [*self.stop_tokens, *self.turn_ends]
        return join_parts(parts, self.max_seq_len, self.truncation_type, eos_id, turn_end_ids)


def _refuse_untrained_parts(messages: Sequence[Message], reader: str) -> None:
    """Raise :class:`DataError` if a turn that is trained on has parts that are not, which ``reader`` cannot locate."""
    for i, message in enumerate(messages):
        if not message.masked and message.has_untrained_parts:
            raise DataError(
                f"turn {i} has parts with train: false, but {reader} trains on whole turns: use the checkpoint's own "
                "chat template (torchtune.tokenizers.hf_tokenizer), or take the whole turn out of training"
            )


def join_parts(
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
        # Cut on the left, a row keeps its end, so that all parts are needed.
        if truncation_type == "right" and max_seq_len and len(tokens) > max_seq_len:
            break
    return truncate_row(tokens, mask, max_seq_len, truncation_type, eos_id, stop_ids)


class MarkedTurnsTokenizer(TurnsTokenizer):
    """Base tokenizer for turns of the form ``header text end``, for checkpoints without a chat template.

    A subclass defines :meth:`header`, :meth:`body` and :meth:`turn_end`, mostly with one of the tokenizers for plain
    text, and sets ``special_tokens``, ``bos_id``, ``eos_id`` and ``stop_tokens``. It may define :meth:`opening` and
    :meth:`closing`. It needs ``published``, a :class:`~torchtune.tokenizers.PublishedFiles`, to be saved with
    checkpoints.

    Args:
        max_seq_len: maximum row length in tokens; ``None`` disables truncation.
        prompt_template: texts added to the turns before the layout is applied.
        truncation_type: ``"right"`` cuts the end of a long row, ``"left"`` the beginning.

    Example:
        >>> class RoleTokenizer(torchtune.tokenizers.MarkedTurnsTokenizer):
        ...     def __init__(self, path, max_seq_len=None):
        ...         super().__init__(max_seq_len, prompt_template=None, truncation_type="right")
        ...         self.base = torchtune.tokenizers.HuggingFaceBaseTokenizer(path)
        ...         self.published = self.base.published
        ...         self.special_tokens = self.base.special_tokens
        ...         self.bos_id, self.eos_id = self.base.bos_id, self.base.eos_id
        ...         self.stop_tokens = [self.eos_id]
        ...     def body(self, text):
        ...         return self.base.encode_text(text, add_bos=False, add_eos=False)
        ...     def header(self, role):
        ...         return self.body(f"{role} ")
        ...     def turn_end(self):
        ...         return [self.eos_id]
        >>> roles = RoleTokenizer(str(checkpoint / "tokenizer.json"))
        >>> tokens, mask = roles.tokenize_messages([{"role": "user", "content": "the cat"}])
        >>> tokens[-1] == roles.eos_id, roles.base.decode(roles.body("the cat"))
        (True, 'the cat')
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
        """Return the token ids of a turn; raise :class:`DataError` if the layout has no place for it."""
        name = type(self).__name__
        if message.role not in self.roles:
            raise DataError(f"{name} has no layout for a turn of '{message.role}', only for {', '.join(self.roles)}.")
        ids = self.header(message.role) + self.body(text_only(message, name))
        if not is_open:
            ids = ids + self.turn_end()
        return ids

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
        return self._row(messages, adds_end_tokens(add_end_tokens, add_eos))

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


def tokenize_messages_no_special_tokens(
    tokenizer: Any,
    messages: Sequence[MessageLike],
    *,
    bos_id: int | None = None,
    eos_id: int | None = None,
    truncation_type: str = "right",
    is_open: bool = False,
    begins_once: bool = False,
) -> tuple[list[int], list[bool]]:
    """Tokenize a conversation one text item at a time.

    The BOS token is added at the start and after every assistant turn, the EOS token after every assistant turn.
    Trailing spaces of a text are dropped, because SentencePiece attaches a space to the following word. A text that
    continues another gets no leading space from the tokenizer.

    Args:
        tokenizer: has ``encode(text, add_bos, add_eos, trim_leading_whitespace)`` and ``max_seq_len``.
        messages: the conversation, with the layout's texts already added.
        bos_id: BOS token; ``None`` adds none.
        eos_id: EOS token; ``None`` adds none.
        truncation_type: ``"right"`` cuts the end of a long row, ``"left"`` the beginning.
        is_open: add no EOS token after the last turn, so that the model continues it.
        begins_once: add no BOS token after assistant turns.

    Returns:
        token ids and mask (True = not trained on).

    Raises:
        DataError: a message contains an image.
    """
    messages = as_messages(messages)
    _refuse_untrained_parts(messages, type(tokenizer).__name__)
    parts = _plain_parts(tokenizer, messages, bos_id, eos_id, is_open=is_open, begins_once=begins_once)
    truncation_eos_id = eos_id
    if is_open:
        truncation_eos_id = None
    return join_parts(parts, tokenizer.max_seq_len, truncation_type, truncation_eos_id, tokenizer.stop_tokens)


def _plain_parts(
    tokenizer: Any,
    messages: list[Message],
    bos_id: int | None,
    eos_id: int | None,
    *,
    is_open: bool,
    begins_once: bool,
) -> Iterator[Part]:
    """Yield the parts of :func:`tokenize_messages_no_special_tokens`: control tokens, and one part for each text."""
    starts_exchange = True  # the next text follows a BOS or EOS token
    ends_with_space = False
    for i, message in enumerate(messages):
        is_first = i == 0
        is_last = i == len(messages) - 1
        if starts_exchange and bos_id is not None and (is_first or not begins_once):
            yield [bos_id], message.masked
        for item in message.content:
            if item["type"] != "text":
                raise DataError(f"This tokenizer takes text only, but a turn of '{message.role}' holds an image.")
            # SentencePiece begins a text with a space, which a text after another must not have.
            continues_text = not starts_exchange and not ends_with_space
            text = item["content"]
            # A space at the end of the text is left out here: SentencePiece puts it before the next text.
            ids = tokenizer.encode(
                text.rstrip(" "), add_bos=False, add_eos=False, trim_leading_whitespace=continues_text
            )
            yield ids, message.masked
            if text:  # an empty text leaves the one before it as the last
                ends_with_space = text.endswith(" ")
            starts_exchange = False
        if message.role == "assistant":
            starts_exchange = True
            if eos_id is not None and not (is_open and is_last):
                yield [eos_id], message.masked
