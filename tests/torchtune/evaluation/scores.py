"""Scores of a user's."""

from collections.abc import Sequence

NUMBER = 0.5


def half(rows: Sequence[dict], texts: Sequence[str]) -> list[float | None]:
    """A half for all, and none where the row says so."""
    values = []
    for row, _ in zip(rows, texts, strict=True):
        values.append(None if row.get("hard") else NUMBER)
    return values


def raises(rows: Sequence[dict], texts: Sequence[str]) -> list[float]:
    """Fails for some rows."""
    return [1 / row["divisor"] for row in rows]
