"""Rows of token ids: the label that the loss ignores, and truncation."""

from collections.abc import Collection
from typing import Any

from torchtune.data._rows import DataError
from torchtune.utils import UserError

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
    if truncation_type == "right" and eos_id is not None and tokens[-1] not in stop_ids:
        tokens[-1] = eos_id
        mask[-1] = True
    return tokens, mask
