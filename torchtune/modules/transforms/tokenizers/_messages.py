"""Conversations for tokenizers with a plain-text layout."""

from collections.abc import Sequence
from typing import Any

from torchtune.data import DataError, MessageLike, as_messages
from torchtune.data._truncate import truncate_row


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
    """Tokenize a conversation, text after text.

    The token of the beginning is put at the start and after every turn of the assistant, the token of the end after
    every turn of the assistant. Trailing spaces of a text are dropped, because a token takes its space with it; a
    text that continues another gets no space of the model's own.

    Args:
        tokenizer: has ``encode(text, add_bos, add_eos, trim_leading_whitespace)`` and ``max_seq_len``.
        messages: the conversation, with the layout's texts in it.
        bos_id: token of the beginning, if wanted.
        eos_id: token of the end, if wanted.
        truncation_type: which end of a long row is kept.
        is_open: the last turn does not end, because a model is to go on.
        begins_once: no further token of the beginning after turns of the assistant.

    Returns:
        token ids, and for each whether it is masked (not trained on).

    Raises:
        DataError: a message holds an image.
    """
    messages = as_messages(messages)
    tokens: list[int] = []
    mask: list[bool] = []
    starts_turn, ends_with_space = True, False
    for i, message in enumerate(messages):
        before = len(tokens)
        if starts_turn and bos_id is not None and not (begins_once and tokens):
            tokens.append(bos_id)
        for item in message.content:
            if item["type"] != "text":
                raise DataError(f"This tokenizer takes text only, but a turn of '{message.role}' holds an image.")
            tokens += tokenizer.encode(
                item["content"].rstrip(" "),
                add_bos=False,
                add_eos=False,
                trim_leading_whitespace=not starts_turn and not ends_with_space,
            )
            ends_with_space = item["content"].endswith(" ") or (ends_with_space and not item["content"])
            starts_turn = False
        if message.role == "assistant":
            if eos_id is not None and not (is_open and i == len(messages) - 1):
                tokens.append(eos_id)
            starts_turn = True
        mask += [message.masked] * (len(tokens) - before)
        if truncation_type == "right" and tokenizer.max_seq_len and len(tokens) > tokenizer.max_seq_len:
            break
    cut_id = None if is_open else eos_id
    return truncate_row(tokens, mask, tokenizer.max_seq_len, truncation_type, cut_id, tokenizer.stop_tokens)
