"""Tokenization of conversations in a plain-text layout."""

from collections.abc import Iterator, Sequence
from typing import Any

from torchtune.data import DataError, Message, MessageLike, as_messages
from torchtune.tokenizers._turns import Part, joined_row


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
    parts = _parts(tokenizer, as_messages(messages), bos_id, eos_id, is_open=is_open, begins_once=begins_once)
    cut_id = None if is_open else eos_id
    return joined_row(parts, tokenizer.max_seq_len, truncation_type, cut_id, tokenizer.stop_tokens)


def _parts(
    tokenizer: Any,
    messages: list[Message],
    bos_id: int | None,
    eos_id: int | None,
    *,
    is_open: bool,
    begins_once: bool,
) -> Iterator[Part]:
    starts_turn, ends_with_space, has_begun = True, False, False
    for i, message in enumerate(messages):
        if starts_turn and bos_id is not None and not (begins_once and has_begun):
            yield [bos_id], message.masked
        for item in message.content:
            if item["type"] != "text":
                raise DataError(f"This tokenizer takes text only, but a turn of '{message.role}' holds an image.")
            follows = not starts_turn and not ends_with_space
            text = item["content"].rstrip(" ")
            ids = tokenizer.encode(text, add_bos=False, add_eos=False, trim_leading_whitespace=follows)
            yield ids, message.masked
            ends_with_space = item["content"].endswith(" ") or (ends_with_space and not item["content"])
            starts_turn = False
        starts_turn, has_begun = starts_turn or message.role == "assistant", True
        is_last = is_open and i == len(messages) - 1
        if message.role == "assistant" and eos_id is not None and not is_last:
            yield [eos_id], message.masked
