"""What a tokenizer is."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torchtune.data import DataError, Message, MessageLike
from torchtune.data._common import as_sample


class BaseTokenizer(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        """Token ids of ``text``."""
        ...

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        """Text of token ids."""
        ...


class ModelTokenizer(Protocol):
    """Messages to token ids, in a model's prompt layout."""

    special_tokens: dict[str, int]
    max_seq_len: int | None

    def tokenize_messages(self, messages: Sequence[MessageLike], **kwargs: Any) -> tuple[list[int], list[bool]]:
        """Token ids of a conversation, and for each whether it is masked (not trained on)."""
        ...


def check_text(text: Any) -> None:
    """Raise :class:`DataError` where what is to be encoded is no text, such as a list of texts."""
    if not isinstance(text, str):
        raise DataError(f"encode takes one text, not {type(text).__name__}: call it once for each text")


def row_of(sample: Any) -> dict[str, Any]:
    """A copy of a sample. Raises :class:`DataError` where it is none."""
    if isinstance(sample, str):
        raise DataError("a tokenizer takes a row with 'messages', not a text: encode(text) gives the ids of one")
    return as_sample(sample, "the message transform")


class MessageTransform:
    """``tokenizer(sample, inference=False)``, the same for every tokenizer with ``tokenize_messages``."""

    def __call__(self, sample: Mapping[str, Any], inference: bool = False) -> dict[str, Any]:
        """Replace ``messages`` by ``tokens`` and ``mask`` (True = not trained on).

        Args:
            sample: has ``messages``.
            inference: leave the last turn open, for a model to continue.

        Raises:
            DataError: the messages do not fit the prompt layout.
        """
        sample = row_of(sample)
        tokens, mask = self.tokenize_messages(messages_of(sample), add_end_tokens=not inference)
        return {**sample, "tokens": tokens, "mask": mask}


def messages_of(sample: dict[str, Any]) -> Sequence[MessageLike]:
    """Take the conversation out of a sample. Raises :class:`DataError` where there is none."""
    if "messages" not in sample:
        raise DataError(
            f"there are no 'messages' among {', '.join(map(repr, sample)) or 'nothing'}: the message transform has to "
            "give them"
        )
    return sample.pop("messages")


class MessagesWithToolsTransform(MessageTransform):
    """The same for tokenizers with a ``tokenize_messages`` that takes tool definitions."""

    def __call__(self, sample: Mapping[str, Any], inference: bool = False) -> dict[str, Any]:
        """Replace ``messages`` (and ``tools``, if there are any) by ``tokens`` and ``mask`` (True = not trained on).

        Args:
            sample: has ``messages``, and may have ``tools``.
            inference: leave the last turn open, for a model to continue.

        Raises:
            DataError: the messages do not fit the prompt layout.
        """
        sample = row_of(sample)
        tokens, mask = self.tokenize_messages(
            messages_of(sample), add_end_tokens=not inference, tools=sample.pop("tools", None)
        )
        return {**sample, "tokens": tokens, "mask": mask}


def arrays_of(transform: Any, sample: Mapping[str, Any]) -> Mapping[str, Any]:
    """``transform(sample)``, with arrays for lists where its class gives these: they are made in less time."""
    as_arrays = vars(type(transform)).get("as_arrays")  # a class derived from it may tokenize in another way
    return transform(sample) if as_arrays is None else as_arrays(transform, sample)


def end_tokens(add_end_tokens: bool, add_eos: bool | None) -> bool:
    """``add_end_tokens``, or its old spelling with a warning."""
    if add_eos is None:
        return add_end_tokens
    warnings.warn("add_eos is deprecated here: use add_end_tokens.", FutureWarning, stacklevel=3)
    return add_eos


def text_only(message: Message, name: str) -> str:
    """The text of a turn. Raises :class:`DataError` where it holds media or tool calls that no text stands for."""
    if message.contains_media:
        raise DataError(f"{name} takes text only, but a turn of '{message.role}' holds an image.")
    if message.extra.get("tool_calls") and not message.text_content:
        raise DataError(
            f"{name} has no layout for structured tool_calls: use the checkpoint's own chat template "
            "(torchtune.modules.transforms.tokenizers.hf_tokenizer)."
        )
    return message.text_content
