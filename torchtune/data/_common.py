"""Shared definitions of the data package."""

from collections.abc import Mapping
from typing import Any, Protocol

from torchtune._lazy import former_names
from torchtune.utils import UserError

# Label of a position that is excluded from the loss.
CROSS_ENTROPY_IGNORE_IDX = -100


class DataError(UserError, ValueError):
    """Raised for invalid data, prompt templates or tokenizer files; the message names invalid rows."""


class SourceNumber(int):
    """Index of the dataset that an example of a mixture is from; ``names`` are the names of all datasets."""

    names: tuple[str, ...] = ()


class Transform(Protocol):
    """Callable that converts a sample: a row to messages, or messages to tokens."""

    def __call__(self, sample: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the converted sample."""
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
    if any(base.__module__.partition(".")[0] == "transformers" for base in type(tokenizer).__mro__):
        raise DataError(
            f"tokenizer: a {type(tokenizer).__name__} of transformers masks and ends nothing here: give "
            "torchtune.tokenizers.hf_tokenizer(folder), which reads the same files."
        )
    for name in needed:
        if not hasattr(tokenizer, name):
            kind = type(tokenizer).__name__
            raise DataError(f"tokenizer: a {kind} has no {name}, which {reader} needs ({_NEEDED[name]}): add it.")


def copy_sample(sample: Any, giver: str) -> dict[str, Any]:
    """Copy a sample returned by ``giver``. Raises :class:`DataError` if it is not a mapping."""
    if not isinstance(sample, Mapping):
        raise DataError(f"{giver} gives {type(sample).__name__}, not a mapping")
    return dict(sample)


def read_label(value: Any) -> bool | None:
    """Return whether an answer is good, by its label (a bool, 1, 0, or one of them as text); None for another value."""
    if isinstance(value, str):
        return {"true": True, "1": True, "false": False, "0": False}.get(value.strip().lower())
    return bool(value) if value in (True, False) else None


__getattr__ = former_names(__name__)
