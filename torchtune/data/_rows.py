"""Rows of data: their columns, transforms and token ids, and the error for invalid ones."""

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from torchtune.utils import UserError


class DataError(UserError, ValueError):
    """Raised for invalid data, prompt templates or tokenizer files; the message names invalid rows."""


class Transform(Protocol):
    """Callable that converts a sample: a row to messages, or messages to tokens."""

    def __call__(self, sample: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the converted sample."""
        ...


def copy_sample(sample: Any, giver: str) -> dict[str, Any]:
    """Copy a sample returned by ``giver``. Raises :class:`DataError` if it is not a mapping."""
    if not isinstance(sample, Mapping):
        raise DataError(f"{giver} gives {type(sample).__name__}, not a mapping")
    return dict(sample)


def kind_of(value: Any) -> str:
    """Return the name of a value's type, for messages; ``nothing`` for None."""
    if value is None:
        return "nothing"
    return type(value).__name__


def column(sample: Mapping[str, Any], name: str) -> Any:
    """Return a column of a row. Raises :class:`DataError` with the columns and the nearest name if it is missing."""
    if name in sample:
        return sample[name]
    hint = ""
    nearest_names = difflib.get_close_matches(name, list(sample), n=1, cutoff=0.5)
    if nearest_names:
        hint = f"; did you mean '{nearest_names[0]}'"
    present = ", ".join(f"'{key}'" for key in sample)
    raise DataError(f"there is no column '{name}' among {present}{hint} (column_map says which column holds what)")


def text_column(sample: Mapping[str, Any], name: str) -> str:
    """Return a text column of a row. Raises :class:`DataError` if it is missing or not a text."""
    value = column(sample, name)
    if not isinstance(value, str):
        raise DataError(f"column '{name}' holds {kind_of(value)}, not a text")
    return value


def check_column_map(
    column_map: Mapping[str, str] | None, defaults: Mapping[str, str], required: Sequence[str]
) -> dict[str, str]:
    """Check and return a mapping from keys to columns; return ``defaults`` if it is None.

    Raises:
        DataError: a required key is missing from ``column_map``, or a key is unknown.
    """
    if column_map is None:
        return dict(defaults)
    for key in required:
        if key not in column_map:
            raise DataError(
                f"column_map needs the key '{key}' (the column that holds it), it has {sorted(column_map)}."
            )
    for key in column_map:
        if key not in defaults:
            raise DataError(f"column_map has the unknown key '{key}': its keys are {', '.join(defaults)}.")
    return dict(column_map)


# Label of a position that is excluded from the loss.
CROSS_ENTROPY_IGNORE_IDX = -100


class SourceNumber(int):
    """Index of the dataset that an example of a mixture is from; ``names`` are the names of all datasets."""

    names: tuple[str, ...] = ()


def truncate(
    tokens: list[Any], max_seq_len: int, eos_id: Any | None = None, truncation_type: str = "right"
) -> list[Any]:
    """Truncate ``tokens``, or a list of the same length such as a mask, to ``max_seq_len``.

    Args:
        tokens: the list to truncate.
        max_seq_len: maximum length of the result.
        eos_id: replaces the last element of the result, even if nothing was removed.
        truncation_type: ``"right"`` keeps the beginning, ``"left"`` keeps the end.

    Raises:
        DataError: ``truncation_type`` is unknown.

    Example:
        >>> torchtune.data.truncate([1, 2, 3, 4], 3, eos_id=9)
        [1, 2, 9]
    """
    if truncation_type == "right":
        truncated = tokens[:max_seq_len]
    elif truncation_type == "left":
        truncated = tokens[-max_seq_len:]
    else:
        raise DataError(f"truncation_type must be 'right' or 'left', not '{truncation_type}'.")
    if eos_id is not None and truncated:
        truncated[-1] = eos_id
    return truncated


def truncate_row(
    tokens: list[int],
    mask: list[bool],
    max_seq_len: int | None,
    truncation_type: str,
    eos_id: int | None = None,
    stop_ids: Collection[int] = (),
) -> tuple[list[int], list[bool]]:
    """Truncate a row and its mask to ``max_seq_len``.

    If ``eos_id`` is not None, it replaces the last token of a row that is truncated on the right. This token is masked,
    because the text does not end there. A last token in ``stop_ids`` is not replaced, because a turn ends there and the
    model should learn to stop.
    """
    if max_seq_len is None or len(tokens) <= max_seq_len:
        return tokens, mask
    if max_seq_len < 1:
        raise UserError(f"max_seq_len must be at least 1, not {max_seq_len}.")
    tokens = truncate(tokens, max_seq_len, truncation_type=truncation_type)
    mask = truncate(mask, max_seq_len, truncation_type=truncation_type)
    # A row that is cut on the left still has its own end.
    if truncation_type == "right" and eos_id is not None and tokens[-1] not in stop_ids:
        tokens[-1] = eos_id
        mask[-1] = True
    return tokens, mask
