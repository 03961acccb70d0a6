"""Rows that are longer than the context."""

from collections.abc import Collection
from typing import Any

from torchtune.data._common import DataError


def truncate(
    tokens: list[Any], max_seq_len: int, eos_id: Any | None = None, truncation_type: str = "right"
) -> list[Any]:
    """Cut ``tokens`` (or any list that runs beside them) to ``max_seq_len``.

    Args:
        tokens: what is cut.
        max_seq_len: longest result.
        eos_id: takes the place of the last element of the result, whether anything was cut or not.
        truncation_type: ``"right"`` keeps the beginning, ``"left"`` keeps the end.

    Raises:
        DataError: unknown ``truncation_type``.
    """
    if truncation_type == "right":
        kept = tokens[:max_seq_len]
    elif truncation_type == "left":
        kept = tokens[-max_seq_len:]
    else:
        raise DataError(f"truncation_type must be 'right' or 'left', not '{truncation_type}'.")
    if eos_id is not None and kept and kept[-1] != eos_id:
        kept[-1] = eos_id
    return kept


def truncate_row(
    tokens: list[int],
    mask: list[bool],
    max_seq_len: int | None,
    truncation_type: str,
    eos_id: int | None = None,
    stop_ids: Collection[int] = (),
) -> tuple[list[int], list[bool]]:
    """Cut a row and its mask to ``max_seq_len``.

    The end of a row that is cut on the left is its real end: nothing takes its place. A row that is cut on the right
    ends with ``eos_id``, where that is given. This token stands where the text did not end, so it is never trained on;
    it takes no token of ``stop_ids`` away, because a turn that does end there teaches to stop.
    """
    if max_seq_len is None or len(tokens) <= max_seq_len:
        return tokens, mask
    tokens = truncate(tokens, max_seq_len, truncation_type=truncation_type)
    mask = truncate(mask, max_seq_len, truncation_type=truncation_type)
    if truncation_type == "right" and eos_id is not None and tokens[-1] not in stop_ids:
        tokens[-1], mask[-1] = eos_id, True
    return tokens, mask
