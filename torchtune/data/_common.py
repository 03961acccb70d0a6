"""What every part of the data room shares."""

from collections.abc import Mapping
from typing import Any, Protocol

from torchtune.utils import UserError

# Label of a position that carries no loss.
CROSS_ENTROPY_IGNORE_IDX = -100


class DataError(UserError, ValueError):
    """Data, a prompt template or a tokenizer file that cannot be used; names rows where rows are to blame."""


class Transform(Protocol):
    """Turns one sample into another: a row into messages, messages into tokens."""

    def __call__(self, sample: Mapping[str, Any]) -> Mapping[str, Any]:
        """The changed sample."""
        ...


def as_sample(sample: Any, giver: str) -> dict[str, Any]:
    """A copy of a sample. Raises :class:`DataError` where what ``giver`` gives is no mapping."""
    if not isinstance(sample, Mapping):
        raise DataError(f"{giver} gives {type(sample).__name__}, not a mapping")
    return dict(sample)
