"""Shared definitions of the data package."""

from collections.abc import Mapping
from typing import Any, Protocol

from torchtune.utils import UserError

# Ignore index: label of a position without a loss.
CROSS_ENTROPY_IGNORE_IDX = -100


class DataError(UserError, ValueError):
    """Invalid data, prompt template or tokenizer file; the message names the rows if rows are invalid."""


class SourceNumber(int):
    """The ``source`` of an example of a mixture: its number among ``names``."""

    names: tuple[str, ...] = ()


class Transform(Protocol):
    """Maps one sample to another: a row to messages, or messages to tokens."""

    def __call__(self, sample: Mapping[str, Any]) -> Mapping[str, Any]:
        """The changed sample."""
        ...


def check_tokenizer(tokenizer: Any) -> None:
    """Raise :class:`DataError` for a tokenizer of transformers, whose calls mean something else."""
    if any(base.__module__.partition(".")[0] == "transformers" for base in type(tokenizer).__mro__):
        raise DataError(
            f"tokenizer: a {type(tokenizer).__name__} of transformers masks and ends nothing here: give "
            "torchtune.modules.transforms.tokenizers.hf_tokenizer(folder), which reads the same files."
        )


def as_sample(sample: Any, giver: str) -> dict[str, Any]:
    """A copy of a sample that ``giver`` returned. Raises :class:`DataError` if it is not a mapping."""
    if not isinstance(sample, Mapping):
        raise DataError(f"{giver} gives {type(sample).__name__}, not a mapping")
    return dict(sample)
