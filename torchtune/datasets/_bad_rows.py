"""Rows that cannot be used, reported together."""

from torchtune.data import DataError

_MOST = 10


class BadRows:
    """Collects what is wrong with which rows, and gives up after ten, unless they are to be left out.

    Args:
        source: what the rows are from.
        drop: rows are left out, however many; None where a dataset has no such switch.
    """

    def __init__(self, source: str, *, drop: bool | None = None) -> None:
        self.source = source
        self._drop = drop
        self._rows: dict[str, list[int]] = {}

    def add(self, row: int, reason: str) -> None:
        """Note a row. Raises :class:`DataError` when it is the tenth."""
        self._rows.setdefault(reason.rstrip("."), []).append(row)
        if not self._drop and sum(map(len, self._rows.values())) >= _MOST:
            self.check(more=True)

    @property
    def dropped(self) -> list[int]:
        """Rows that are left out, in order."""
        return sorted(row for rows in self._rows.values() for row in rows)

    @property
    def reasons(self) -> str:
        """What is wrong with which rows, the first of each kind by number."""
        parts = []
        for reason, rows in self._rows.items():
            more = f" and {len(rows) - _MOST:,} more" if len(rows) > _MOST else ""
            parts.append(f"row{'s' if len(rows) > 1 else ''} {', '.join(map(str, rows[:_MOST]))}{more}: {reason}")
        return "; ".join(parts)

    def check(self, more: bool = False) -> None:
        """Raise :class:`DataError` if any row was noted; ``more``: there may be others."""
        if not self._rows or self._drop:
            return
        end = " (looked no further)" if more else ""
        how = "filter_fn" if self._drop is None else "drop_bad_rows=True"
        raise DataError(
            f"{self.source} has rows that cannot be trained on, counted from 0: {self.reasons}{end}; "
            f"correct them or leave them out with {how}."
        )
