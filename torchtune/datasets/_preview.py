"""A look at data before all of it is read: the seam through which a dry run sees datasets of any kind."""

import glob
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtune.utils import UserError

_SMALL = 1 << 23  # bytes that are loaded at once


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


def first_lines(names: Sequence[str], split: Any) -> Any:
    """Called by ``load_rows`` with the files of JSON lines that it reads: the first rows without loading all.

    None where all have to be loaded: outside of a :func:`preview`, or for a part of a split.
    """
    found = _current.get()
    suffixes = {Path(name).suffix.lower() for name in names}
    if found is None or split != "train" or not names or not suffixes <= {".jsonl", ".ndjson"}:
        return None
    paths = [path for name in names for path in sorted(glob.glob(str(Path(name).expanduser()), recursive=True))]
    if sum(os.path.getsize(path) for path in paths) < _SMALL:
        return None
    import datasets

    stream = datasets.load_dataset("json", data_files=paths, split=split, streaming=True)
    part = datasets.Dataset.from_list(list(stream.take(found.limit)), features=stream.features)
    total = 0
    for path in paths:
        with open(path, "rb") as file:
            while block := file.read(1 << 22):
                total, last = total + block.count(b"\n"), block[-1:]
            total += last != b"\n"
    found.total, found.read = found.total + total, found.read + len(part)
    return part


def limited(rows: Any) -> Any:
    """Called by ``load_rows`` with what it returns."""
    found = _current.get()
    if found is None:
        return rows
    part = rows.select(range(min(len(rows), found.limit)))
    found.total, found.read = found.total + len(rows), found.read + len(part)
    return part
