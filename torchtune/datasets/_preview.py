"""Previews of datasets, for a dry run that reads only the first rows of each source."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torchtune.utils import UserError


@dataclass
class Preview:
    """Row counts of a :func:`preview` block.

    Args:
        limit: maximum number of rows to read per source; 0 reads none.

    Attributes:
        total: number of rows of all sources.
        read: number of rows that were read.
    """

    limit: int
    total: int = 0
    read: int = 0


class NotRead(UserError):
    """Raised in a :func:`preview` for a source that is not read, because it is remote or ``limit`` is 0."""


_current: ContextVar[Preview | None] = ContextVar("preview", default=None)


@contextmanager
def preview(limit: int) -> Iterator[Preview]:
    """Make ``load_rows`` return the first ``limit`` rows inside the block, without Hub downloads.

    Raises:
        NotRead: (from ``load_rows``) the rows are on the Hub, or ``limit`` is 0 and the source exists.
    """
    counts = Preview(limit)
    token = _current.set(counts)
    try:
        yield counts
    finally:
        _current.reset(token)


def is_preview() -> bool:
    """Return whether a :func:`preview` is active. Rows read in a preview are incomplete and must not be cached."""
    return _current.get() is not None


def reads_nothing() -> bool:
    """Return whether the active :func:`preview` only checks that sources exist."""
    current = _current.get()
    return current is not None and current.limit == 0


def check_read_in_preview(source: str, *, is_remote: bool) -> None:
    """Raise :class:`NotRead` if the active preview does not read a source; call it before reading the source."""
    current = _current.get()
    if current is None:
        return
    if is_remote:
        raise NotRead(f"{source} is fetched from the hub when the run starts: its rows are not known yet")
    if current.limit == 0:
        raise NotRead(f"{source} is there")


def limit_to_preview(rows: Any) -> Any:
    """Return the first rows in a preview, and count them; otherwise all rows."""
    current = _current.get()
    if current is None:
        return rows
    first_rows = rows.select(range(min(len(rows), current.limit)))
    current.total += len(rows)
    current.read += len(first_rows)
    return first_rows
