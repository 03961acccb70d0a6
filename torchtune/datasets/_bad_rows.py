"""Rows that cannot be trained on: collected for an error message, or skipped and listed."""

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchtune.data import DataError
from torchtune.datasets._data_files import location_of
from torchtune.datasets._row_formats import format_of
from torchtune.utils import append_line, get_logger, get_rank, log_rank_zero, run_log_path

_MOST = 10  # rows that an error message names


class BadRows:
    """Collection of row errors, which raises at the tenth unless such rows are skipped.

    Args:
        source: name of the source, for messages.
        rows: the rows.
        skips: skip rows instead of raising, however many there are.
        skip_setting: the setting that skips such rows, for messages.
        formats: kinds of rows (``RowFormat``) that the dataset reads; empty if it may read any.

    Attributes:
        reasons: (row, reason) of each row.
    """

    def __init__(
        self, source: str, rows: Any, *, skips: bool, skip_setting: str, formats: Collection[str] = ()
    ) -> None:
        self._source = source
        self._rows = rows
        self._skips = skips
        self._skip_setting = skip_setting
        self._formats = formats
        self.reasons: list[tuple[int, str]] = []

    def add(self, row: int, reason: str) -> None:
        """Record a row; raise :class:`DataError` at the tenth."""
        self.reasons.append((row, reason))
        if len(self.reasons) == _MOST:
            self.check()

    def check(self) -> None:
        """Raise :class:`DataError` if any row was recorded and is not skipped."""
        if not self.reasons or self._skips:
            return
        remarks = ""
        first, _ = self.reasons[0]
        location = location_of(self._rows, first)
        if location:
            remarks = f" (row {first} is {location})"
        if len(self.reasons) == _MOST:
            remarks += " (looked no further)"
        raise DataError(
            f"{self._source} has rows that cannot be trained on, counted from 0: {_by_reason(self.reasons)}{remarks}; "
            f"{self._advise_dataset()}correct them or leave them out with {self._skip_setting}."
        )

    def _advise_dataset(self) -> str:
        """Return the advice to use another dataset, if all rows so far are of a format that this one does not read."""
        bad_rows = [row for row, _ in self.reasons]
        first_rows = list(range(min(len(self._rows), _MOST)))
        # A row between good ones is a mistake in the data, not in the choice of the dataset.
        if not self._formats or bad_rows != first_rows:
            return ""
        try:
            row = self._rows[0]
        except DataError:  # a broken line
            return ""
        if not isinstance(row, Mapping):
            return ""
        row_format = format_of(row)
        if not row_format.builder or row_format.kind in self._formats:
            return ""
        return f"these are {row_format.kind}: use {row_format.builder}, "


def _by_reason(reasons: Sequence[tuple[int, str]]) -> str:
    """Describe rows: each of the first ten reasons with the numbers of its first ten rows."""
    rows_of: dict[str, list[int]] = {}
    for row, reason in reasons:
        # A full stop would end the sentence of the message, which goes on after each reason.
        rows_of.setdefault(reason.rstrip("."), []).append(row)
    parts = []
    for reason, rows in rows_of.items():
        unit = "row"
        if len(rows) > 1:
            unit = "rows"
        numbers = ", ".join(map(str, rows[:_MOST]))
        if len(rows) > _MOST:
            numbers += f" and {len(rows) - _MOST:,} more"
        parts.append(f"{unit} {numbers}: {reason}")
    text = "; ".join(parts[:_MOST])
    if len(parts) > _MOST:
        text += "; and so on"
    return text


# Lines of each file of skipped rows: a process may execute several runs.
_listed: dict[Path | None, set[str]] = {}


def _skipped_rows_path() -> Path | None:
    """Return the path of the list of skipped rows; None outside a run."""
    log = run_log_path(0)
    if log is None:
        return None
    return log.parent.parent / "skipped_rows.jsonl"


def num_left_out() -> int:
    """Return the number of distinct rows that this process has skipped in the current run."""
    return len(_listed.get(_skipped_rows_path(), ()))


def list_left_out(rows: Sequence[tuple[Mapping[str, Any], str]]) -> str:
    """Append skipped rows to ``skipped_rows.jsonl`` in the run's folder, on rank 0; a resume does not repeat rows.

    Args:
        rows: (``source`` and ``line`` or ``row``, reason).

    Returns:
        path of the file; empty without a run (:func:`torchtune.utils.get_run_logger`).
    """
    path = _skipped_rows_path()  # None without a run, where the rows are only counted (num_left_out)
    listed = _listed.setdefault(path, set())
    lines = [json.dumps({**origin, "reason": reason}) for origin, reason in rows]
    # A row can come again: in another dataset of the same source, or in the next pass over a stream.
    new_lines = [line for line in dict.fromkeys(lines) if line not in listed]
    listed.update(new_lines)
    if path is None:
        return ""
    if get_rank() != 0:  # all ranks count the rows, and one lists them
        return str(path)
    # The file has the rows that the run listed before it was resumed.
    with suppress(OSError):  # it cannot be read, or does not exist yet
        written_lines = set(path.read_text(encoding="utf-8").splitlines())
        new_lines = [line for line in new_lines if line not in written_lines]
    if new_lines:
        append_line(path, "\n".join(new_lines))
    return str(path)


def report_left_out(reasons: Sequence[tuple[int, str]], source: str, total: int, num_left: int) -> None:
    """Log a warning about skipped rows and list all of them, including rows that an earlier run found.

    Args:
        reasons: (row, reason) of the skipped rows.
        source: name of the source.
        total: number of rows of the source.
        num_left: number of rows that are trained on.

    Raises:
        DataError: no row is left.
    """
    if not reasons:
        return
    path = list_left_out([({"source": source, "row": row}, reason) for row, reason in reasons])
    message = f"{len(reasons):,} of {total:,} rows of {source} are left out ({_by_reason(reasons)})"
    if path:
        message += f", all of them in {path}"
    log_rank_zero(get_logger(), f"{message}.", logging.WARNING)
    if num_left == 0:
        raise DataError(f"{source}: no row is left that can be trained on.")
