"""Rows of data: their columns, the protocol of their transforms, and the error for invalid ones."""

import difflib
from collections.abc import Mapping, Sequence
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
