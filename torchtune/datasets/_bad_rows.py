"""Collection and reporting of rows that cannot be trained on."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtune.data import DataError
from torchtune.utils import explain_os_error, get_logger, get_rank, log_rank_zero, run_log_path

_MOST = 10


class BadRows:
    """Collection of row errors, which raises at the tenth unless such rows are skipped.

    Args:
        source: name of the source, for messages.
        rows: the rows; a ``place`` method, if any, gives the file and line of a row.
        drop: skip any number of rows; None if the dataset has no such setting.
        switch: the setting that skips them, for messages.
    """

    def __init__(
        self, source: str, *, rows: Any = None, drop: bool | None = None, switch: str = "drop_bad_rows=True"
    ) -> None:
        self.source = source
        self._place: Callable[[int], str] | None = getattr(rows, "place", None)
        self._drop, self._switch = drop, switch
        self._rows: dict[str, list[int]] = {}

    def add(self, row: int, reason: str) -> None:
        """Record a row; raise :class:`DataError` at the tenth."""
        self._rows.setdefault(reason.rstrip("."), []).append(row)
        if not self._drop and sum(map(len, self._rows.values())) >= _MOST:
            self.check(more=True)

    @property
    def dropped(self) -> list[int]:
        """Numbers of the skipped rows, sorted."""
        return sorted(row for rows in self._rows.values() for row in rows)

    @property
    def left_out(self) -> list[tuple[int, str]]:
        """(row, reason) of all skipped rows, sorted."""
        return sorted((row, reason) for reason, rows in self._rows.items() for row in rows)

    @property
    def reasons(self) -> str:
        """Each reason with the numbers of its first rows."""
        parts = []
        for reason, rows in self._rows.items():
            more = f" and {len(rows) - _MOST:,} more" if len(rows) > _MOST else ""
            parts.append(f"row{'s' if len(rows) > 1 else ''} {', '.join(map(str, rows[:_MOST]))}{more}: {reason}")
        return "; ".join(parts)

    def check(self, more: bool = False) -> None:
        """Raise :class:`DataError` if any row was recorded; ``more``: there may be others."""
        if not self._rows or self._drop:
            return
        end = " (looked no further)" if more else ""
        first = min(min(rows) for rows in self._rows.values())
        where = "" if self._place is None else f" (row {first} is {self._place(first)})"
        how = "filter_fn" if self._drop is None else self._switch
        raise DataError(
            f"{self.source} has rows that cannot be trained on, counted from 0: {self.reasons}{where}{end}; "
            f"correct them or leave them out with {how}."
        )


_listed: dict[Path | None, set[str]] = {}  # per file, because a process may execute several runs


def _file() -> Path | None:
    log = run_log_path(0)
    return None if log is None else log.parent.parent / "skipped_rows.jsonl"


def num_left_out() -> int:
    """Return the number of distinct rows that this process has skipped in the current run."""
    return len(_listed.get(_file(), ()))


def list_left_out(rows: Sequence[tuple[Mapping[str, Any], str]]) -> Path | None:
    """Append skipped rows to ``skipped_rows.jsonl`` in the run's folder, on rank 0, each once even after a resume.

    Args:
        rows: (``source`` and ``line`` or ``row``, reason).

    Returns:
        path of the file; None without a run (:func:`torchtune.utils.get_run_logger`).
    """
    path = _file()
    listed = _listed.setdefault(path, set())
    lines = [json.dumps({**origin, "reason": reason}) for origin, reason in rows]
    new = [line for line in dict.fromkeys(lines) if line not in listed]
    listed.update(new)
    if path is None or get_rank() != 0:
        return path
    try:
        before = set(path.read_text(encoding="utf-8").splitlines()) if path.exists() else set()
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in new if line not in before)
    except OSError as error:
        get_logger().warning(str(explain_os_error(error, path)))
    return path


def say_what_is_left_out(rows: Sequence[tuple[int, str]], source: str, total: int) -> None:
    """Log a warning about skipped rows and list all of them, also if they were found by an earlier run.

    Raises:
        DataError: no row is left.
    """
    if not rows:
        return
    path = list_left_out([({"source": source, "row": row}, reason) for row, reason in rows])
    shown = "; ".join(f"row {row}: {reason}" for row, reason in rows[:_MOST])
    more = f" and {len(rows) - _MOST:,} more" if len(rows) > _MOST else ""
    listed = "" if path is None else f", all of them in {path}"
    log_rank_zero(
        get_logger(),
        f"{len(rows):,} of {total:,} rows of {source} are left out ({shown}{more}){listed}.",
        logging.WARNING,
    )
    if len(rows) == total:
        raise DataError(f"{source}: no row is left that can be trained on.")
