"""Tokenizer protocols, and the transform, checks and patterns that tokenizers share."""

import logging
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torchtune.data import DataError, Message, MessageLike, copy_sample
from torchtune.utils import get_logger, log_once


class BaseTokenizer(Protocol):
    """Protocol of a tokenizer for plain text."""

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        """Encode ``text`` into token ids."""
        ...

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        """Decode token ids into text."""
        ...


class RecipeTokenizer(Protocol):
    """Protocol of a tokenizer of your own in a recipe: the number of its tokens, and what your dataset calls.

    A dataset of your own gets the tokenizer and calls what it likes. Everything else is optional, and needed for:

    - ``encode(text, add_bos=True, add_eos=True)``, which returns ids: ``text_completion_dataset``.
    - ``__call__({"messages": [...]}, inference=False)``, which returns ``{"tokens": ids, "mask": bools}``: all datasets
      of conversations; ``mask`` is True where a token is not trained on.
    - ``decode(ids)``, which returns a text, and ``stop_tokens``, a list of ids: generation, rollouts and answers in the
      report.
    - ``max_seq_len``: truncation and packing.
    - ``save_files(folder)``: tokenizer files in checkpoints.
    - ``pad_id``: padded batches; 0 without it.
    - ``fingerprint``, a text that changes when the tokenizer does: reuse of tokenized rows between runs.

    Attributes:
        vocab_size: one more than the largest id; the embedding must have as many rows.
    """

    vocab_size: int


class ModelTokenizer(Protocol):
    """Protocol of a tokenizer for conversations, in a model's chat layout."""

    special_tokens: dict[str, int]
    max_seq_len: int | None

    def tokenize_messages(self, messages: Sequence[MessageLike], **kwargs: Any) -> tuple[list[int], list[bool]]:
        """Return a conversation's token ids and its mask (True = not trained on)."""
        ...


@runtime_checkable
class SavableTokenizer(Protocol):
    """Protocol of a tokenizer that writes its files into checkpoints. Every tokenizer of this library does.

    A tokenizer of your own may leave it out; its checkpoints then hold no tokenizer.
    """

    def save_files(self, folder: str | Path) -> None:
        """Write the files from which ``transformers`` and :func:`hf_tokenizer` load this tokenizer.

        Args:
            folder: existing folder of a checkpoint, without tokenizer files.
        """
        ...


# What a tokenizer may need, with its meaning for messages; see torchtune.tokenizers.RecipeTokenizer.
_NEEDED = {
    "vocab_size": "the number of its tokens",
    "encode": "encode(text, add_bos=True, add_eos=True) returns ids",
    "__call__": 'a call with {"messages": [...]} returns tokens, and a mask that is True where they are not trained',
}


def check_tokenizer(tokenizer: Any, *needed: str, reader: str = "a dataset") -> None:
    """Check the interface of a tokenizer.

    Args:
        tokenizer: a tokenizer of this library, or of the user's own.
        needed: names among ``vocab_size``, ``encode`` and ``__call__``.
        reader: what needs them, for the message.

    Raises:
        DataError: it lacks one of them, or it is a tokenizer of ``transformers``, which has a different interface.
    """
    # Such a tokenizer has an `encode`, whose arguments and results mean something else.
    packages = {base.__module__.partition(".")[0] for base in type(tokenizer).__mro__}
    if "transformers" in packages:
        raise DataError(
            f"tokenizer: a {type(tokenizer).__name__} of transformers masks and ends nothing here: give "
            "torchtune.tokenizers.hf_tokenizer(folder), which reads the same files."
        )
    for name in needed:
        if not hasattr(tokenizer, name):
            kind = type(tokenizer).__name__
            raise DataError(f"tokenizer: a {kind} has no {name}, which {reader} needs ({_NEEDED[name]}): add it.")


def end_of_text(tokenizer: Any, add_eos: bool | None) -> list[int]:
    """Return the tokens that end a text of an embedding model.

    Args:
        tokenizer: the tokenizer; ``end_ids`` of a tokenizer from files are those that the files put behind a text.
        add_eos: ``None`` for these; True for these or, if there are none, the EOS token; False for none.
    """
    published = list(getattr(tokenizer, "end_ids", ()))
    if add_eos is None:
        return published
    if not add_eos:
        return []
    return published or [tokenizer.eos_id]


def check_text(text: Any) -> None:
    """Raise :class:`DataError` if ``text`` is not a string."""
    if not isinstance(text, str):
        raise DataError(f"encode takes one text, not {type(text).__name__}: call it once for each text")


def any_text_pattern(texts: Iterable[str]) -> str:
    """Return a regular expression that matches each of the texts; without any, it matches nothing."""
    # A regular expression takes the first alternative that matches, so that <|im| must not come before <|im_end|>.
    longest_first = sorted(texts, key=len, reverse=True)
    return "|".join(map(re.escape, longest_first)) or "(?!)"


def row_of(sample: Any) -> dict[str, Any]:
    """Return a copy of a sample; raise :class:`DataError` if it is not a mapping."""
    if isinstance(sample, str):
        raise DataError("a tokenizer takes a row with 'messages', not a text: encode(text) gives the ids of one")
    return copy_sample(sample, "the message transform")


class MessageTransform:
    """Makes a tokenizer with ``tokenize_messages`` callable on samples.

    Attributes:
        takes_tools: whether ``tokenize_messages`` takes ``tools``.
    """

    takes_tools = False

    def __call__(self, sample: Mapping[str, Any], inference: bool = False) -> dict[str, Any]:
        """Replace ``messages`` and ``tools`` (if supported) by ``tokens`` and ``mask`` (True = not trained on).

        Args:
            sample: has ``messages``, and may have ``tools``.
            inference: leave the last turn open for the model to continue.

        Raises:
            DataError: the messages do not fit the chat layout.
        """
        sample = row_of(sample)
        tools = sample.get("tools")
        if self.takes_tools:
            sample.pop("tools", None)
        options = tool_options(self, tools)
        tokens, mask = self.tokenize_messages(messages_of(sample), add_end_tokens=not inference, **options)
        return {**sample, "tokens": tokens, "mask": mask}


def messages_of(sample: dict[str, Any]) -> Sequence[MessageLike]:
    """Remove and return a sample's ``messages``; raise :class:`DataError` if there are none."""
    if "messages" not in sample:
        raise DataError(
            f"there are no 'messages' among {', '.join(map(repr, sample)) or 'nothing'}: the message transform has to "
            "give them"
        )
    return sample.pop("messages")


def arrays_of(tokenizer: Any, sample: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``tokenizer(sample)``, or the faster ``tokenizer.as_arrays(sample)`` if its class defines it."""
    # Ignore an inherited one: a subclass may tokenize differently.
    as_arrays = vars(type(tokenizer)).get("as_arrays")
    if as_arrays is None:
        return tokenizer(sample)
    return as_arrays(tokenizer, sample)


def tool_options(tokenizer: Any, tools: Sequence[Any] | None) -> dict[str, Any]:
    """Return the argument of ``tokenize_messages`` with the tools of a row; none without tools.

    A tokenizer whose layout has no place for tools gets none, which is said once.
    """
    if tools is None:
        return {}
    if getattr(tokenizer, "takes_tools", False):
        return {"tools": tools}
    message = (
        f"Rows have tools, which a {type(tokenizer).__name__} does not write into the prompt: use the checkpoint's "
        "chat template (torchtune.tokenizers.hf_tokenizer) if the model has to see them."
    )
    log_once(get_logger(), message, logging.WARNING)
    return {}


def chat_template_text(tokenizer: Any) -> str:
    """Return the sources of a tokenizer's chat templates as one text; empty for a tokenizer without templates."""
    chat_templates = getattr(tokenizer, "chat_templates", {})  # only tokenizers with templates have it
    return "".join(template.source for template in chat_templates.values())


def adds_end_tokens(add_end_tokens: bool, add_eos: bool | None) -> bool:
    """Return ``add_end_tokens``, or the deprecated ``add_eos`` with a warning if it is set."""
    if add_eos is None:
        return add_end_tokens
    warnings.warn("add_eos is deprecated here: use add_end_tokens.", FutureWarning, stacklevel=3)
    return add_eos


def text_only(message: Message, name: str) -> str:
    """Return a turn's text; raise :class:`DataError` if it has media, or tool calls that the text does not replace.

    A turn that is not trained on may have a text beside its calls.
    """
    if message.contains_media:
        raise DataError(f"{name} takes text only, but a turn of '{message.role}' holds an image.")
    if message.extra.get("tool_calls") and not (message.text_content and message.masked):
        raise DataError(
            f"{name} has no layout for structured tool_calls: use the checkpoint's own chat template "
            "(torchtune.tokenizers.hf_tokenizer)."
        )
    return message.text_content
