"""A look at data before all of it is read: the seam through which a dry run sees datasets of any kind."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torchtune.utils import UserError


@dataclass
class Preview:
    """What a block of :func:`preview` sees.

    Args:
        limit: rows to read of every source; 0 reads none.

    Attributes:
        total: rows of all sources.
        read: rows that were read of them.
    """

    limit: int
    total: int = 0
    read: int = 0


class NotRead(UserError):
    """A source of which nothing is read in a :func:`preview`: it is there as far as can be seen, or it is remote."""


_current: ContextVar[Preview | None] = ContextVar("preview", default=None)


@contextmanager
def preview(limit: int) -> Iterator[Preview]:
    """Inside the block ``load_rows`` gives the first ``limit`` rows, and nothing is fetched from the hub.

    Raises:
        NotRead: (from ``load_rows``) the rows are on the hub, or ``limit`` is 0 and the source is there.
    """
    found = Preview(limit)
    token = _current.set(found)
    try:
        yield found
    finally:
        _current.reset(token)


def is_preview() -> bool:
    """Whether this runs in a :func:`preview`, where rows may be some of a source and must not be kept for a run."""
    return _current.get() is not None


def reads_nothing() -> bool:
    """Whether this runs in a :func:`preview` that only sees whether sources are there."""
    found = _current.get()
    return found is not None and found.limit == 0


def look(source: str, *, is_remote: bool) -> None:
    """Called by ``load_rows`` when a source was found to be there, before it is read."""
    found = _current.get()
    if found is None:
        return
    if is_remote:
        raise NotRead(f"{source} is fetched from the hub when the run starts: its rows are not known yet")
    if found.limit == 0:
        raise NotRead(f"{source} is there")


def limited(rows: Any) -> Any:
    """Called by ``load_rows`` with what it returns."""
    found = _current.get()
    if found is None:
        return rows
    part = rows.select(range(min(len(rows), found.limit)))
    found.total, found.read = found.total + len(rows), found.read + len(part)
    return part
