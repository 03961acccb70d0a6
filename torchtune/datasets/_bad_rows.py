"""Rows that cannot be used, reported together."""

from torchtune.data import DataError

_MOST = 10


class BadRows:
    """Collects what is wrong with which rows, and gives up after ten.

    Args:
        source: what the rows are from.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self._rows: dict[str, list[int]] = {}

    def add(self, row: int, reason: str) -> None:
        """Note a row. Raises :class:`DataError` when it is the tenth."""
        self._rows.setdefault(reason, []).append(row)
        if sum(map(len, self._rows.values())) >= _MOST:
            self.check(more=True)

    def check(self, more: bool = False) -> None:
        """Raise :class:`DataError` if any row was noted; ``more``: there may be others."""
        if not self._rows:
            return
        parts = []
        for reason, rows in self._rows.items():
            numbers = ", ".join(map(str, rows))
            parts.append(f"row{'s' if len(rows) > 1 else ''} {numbers}: {reason.rstrip('.')}")
        end = " (looked no further)" if more else ""
        raise DataError(
            f"{self.source} has rows that cannot be trained on, counted from 0: {'; '.join(parts)}{end}; "
            "correct them or leave them out with filter_fn."
        )
