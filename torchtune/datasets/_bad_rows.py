"""Collection and reporting of rows that cannot be trained on."""

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchtune.data import DataError
from torchtune.datasets._file_report import format_of
from torchtune.utils import append_line, get_logger, get_rank, log_rank_zero, run_log_path

_MOST = 10


class BadRows:
    """Collection of row errors, which raises at the tenth unless such rows are skipped.

    Args:
        source: name of the source, for messages.
        rows: the rows; a ``place`` method, if any, gives the file and line of a row.
        skips: skip rows instead of raising, however many there are.
        way_out: the setting that skips such rows, for messages.
        formats: formats of rows that the dataset reads, as ``format_of`` names them; empty if it may read any.

    Attributes:
        found: (row, reason) of each row.
    """

    def __init__(self, source: str, rows: Any, *, skips: bool, way_out: str, formats: Collection[str] = ()) -> None:
        self._source, self._rows, self._skips, self._way_out = source, rows, skips, way_out
        self._formats = formats
        self.found: list[tuple[int, str]] = []

    def add(self, row: int, reason: str) -> None:
        """Record a row; raise :class:`DataError` at the tenth."""
        self.found.append((row, reason))
        if len(self.found) == _MOST:
            self.check()

    def check(self) -> None:
        """Raise :class:`DataError` if any row was recorded and is not skipped."""
        if not self.found or self._skips:
            return
        first, _ = self.found[0]
        where = f" (row {first} is {self._rows.place(first)})" if hasattr(self._rows, "place") else ""
        end = " (looked no further)" if len(self.found) == _MOST else ""
        raise DataError(
            f"{self._source} has rows that cannot be trained on, counted from 0: {_by_reason(self.found)}{where}{end}; "
            f"{self._other_format()}correct them or leave them out with {self._way_out}."
        )

    def _other_format(self) -> str:
        """Return the advice to use another dataset, if all rows so far are of a format that this one does not read."""
        count = len(self.found)
        if not self._formats or [row for row, _ in self.found] != list(range(count)):
            return ""
        if count < min(len(self._rows), _MOST):
            return ""
        try:
            row = self._rows[0]
        except DataError:  # a broken line
            return ""
        kind, reader = format_of(row) if isinstance(row, Mapping) else ("", "")
        if not reader or kind in self._formats:
            return ""
        return f"these are {kind}: use {reader.split()[0]}, "


def _by_reason(bad: Sequence[tuple[int, str]]) -> str:
    """Describe rows: each reason with the numbers of its first rows."""
    found: dict[str, list[int]] = {}
    for row, reason in bad:
        found.setdefault(reason.rstrip("."), []).append(row)
    parts = []
    for reason, rows in found.items():
        more = f" and {len(rows) - _MOST:,} more" if len(rows) > _MOST else ""
        parts.append(f"row{'s' if len(rows) > 1 else ''} {', '.join(map(str, rows[:_MOST]))}{more}: {reason}")
    return "; ".join(parts[:_MOST]) + ("; and so on" if len(parts) > _MOST else "")


_listed: dict[Path | None, set[str]] = {}  # per file, because a process may execute several runs


def _file() -> Path | None:
    log = run_log_path(0)
    return None if log is None else log.parent.parent / "skipped_rows.jsonl"


def num_left_out() -> int:
    """Return the number of distinct rows that this process has skipped in the current run."""
    return len(_listed.get(_file(), ()))


def list_left_out(rows: Sequence[tuple[Mapping[str, Any], str]]) -> str:
    """Append skipped rows to ``skipped_rows.jsonl`` in the run's folder, on rank 0; a resume does not repeat rows.

    Args:
        rows: (``source`` and ``line`` or ``row``, reason).

    Returns:
        path of the file; empty without a run (:func:`torchtune.utils.get_run_logger`).
    """
    path = _file()
    listed = _listed.setdefault(path, set())
    lines = [json.dumps({**origin, "reason": reason}) for origin, reason in rows]
    new = [line for line in dict.fromkeys(lines) if line not in listed]
    listed.update(new)
    if path is None or get_rank() != 0:
        return str(path or "")
    with suppress(OSError):  # the file cannot be written
        before = set(path.read_text(encoding="utf-8").splitlines()) if path.exists() else set()
        new = [line for line in new if line not in before]
    if new:
        append_line(path, "\n".join(new))
    return str(path)


def say_what_is_left_out(bad: Sequence[tuple[int, str]], source: str, total: int) -> None:
    """Log a warning about skipped rows and list all of them, including rows that an earlier run found.

    Raises:
        DataError: no row is left.
    """
    if not bad:
        return
    path = list_left_out([({"source": source, "row": row}, reason) for row, reason in bad])
    listed = f", all of them in {path}" if path else ""
    said = f"{len(bad):,} of {total:,} rows of {source} are left out ({_by_reason(bad)}){listed}."
    log_rank_zero(get_logger(), said, logging.WARNING)
    if len(bad) == total:
        raise DataError(f"{source}: no row is left that can be trained on.")
