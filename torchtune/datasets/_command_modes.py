"""Modes in which a command builds datasets: a preview, and the preparation of an output folder or of a shard of it.

A run builds its datasets in none of these modes. A mode is a context variable that is set inside of a block, because
the sources of rows and the cache that ask for it are made by components of a config, which have no argument for it.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtune.datasets._processes import ROWS
from torchtune.utils import UserError

SHARDS = "shards"  # the folder of shards in an output folder of `tune data prepare`


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


_preview: ContextVar[Preview | None] = ContextVar("preview", default=None)


@contextmanager
def preview(limit: int) -> Iterator[Preview]:
    """Make ``load_rows`` return the first ``limit`` rows inside the block, without Hub downloads.

    Raises:
        NotRead: (from ``load_rows``) the rows are on the Hub, or ``limit`` is 0 and the source exists.
    """
    counts = Preview(limit)
    token = _preview.set(counts)
    try:
        yield counts
    finally:
        _preview.reset(token)


def is_preview() -> bool:
    """Return whether a :func:`preview` is active. Rows read in a preview are incomplete and must not be cached."""
    return _preview.get() is not None


def reads_nothing() -> bool:
    """Return whether the active :func:`preview` only checks that sources exist."""
    current = _preview.get()
    return current is not None and current.limit == 0


def check_read_in_preview(source: str, *, is_remote: bool) -> None:
    """Raise :class:`NotRead` if the active preview does not read a source; call it before reading the source."""
    current = _preview.get()
    if current is None:
        return
    if is_remote:
        raise NotRead(f"{source} is fetched from the hub when the run starts: its rows are not known yet")
    if current.limit == 0:
        raise NotRead(f"{source} is there")


def limit_to_preview(rows: Any) -> Any:
    """Return the first rows in a preview, and count them; otherwise all rows."""
    current = _preview.get()
    if current is None:
        return rows
    first_rows = rows.select(range(min(len(rows), current.limit)))
    current.total += len(rows)
    current.read += len(first_rows)
    return first_rows


_output: ContextVar[Path | None] = ContextVar("output", default=None)


@contextmanager
def preparing(folder: Path) -> Iterator[None]:
    """Make :func:`cache_entry` write rows to ``folder`` inside the block, as ``tune data prepare`` does."""
    token = _output.set(folder)
    try:
        yield
    finally:
        _output.reset(token)


def preparation_folder() -> Path | None:
    """Return the output folder of the active :func:`preparing` block."""
    return _output.get()


def is_preparing() -> bool:
    """Return whether a :func:`preparing` block is active."""
    return _output.get() is not None


@dataclass(frozen=True)
class Shard:
    """One of several parts of the rows of a source.

    Args:
        index: number of the shard, counted from 0.
        count: number of shards.
    """

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """Return the shard of a text such as ``0/4``; raise :class:`UserError` if there is no such shard."""
        match = re.fullmatch(r"(\d+)/(\d+)", text)
        if match is None:
            raise UserError(f"--shard {text} is not a shard: give its number and the number of shards, such as 0/4.")
        shard = cls(int(match[1]), int(match[2]))
        if shard.count == 0:
            raise UserError(f"--shard {text} is one of no shards: give the number of shards, such as 0/4.")
        if shard.index >= shard.count:
            raise UserError(
                f"--shard {text} does not exist: shards are counted from 0, and the last is "
                f"{shard.count - 1}/{shard.count}."
            )
        return shard

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def folder(self, output: Path) -> Path:
        """Return the folder of the shard in the output folder of a preparation."""
        return output / SHARDS / f"{self.index}-of-{self.count}"

    def rows(self, total: int) -> range:
        """Return the shard's rows of a source with ``total`` rows; none if there are fewer batches than shards."""
        batches = -(-total // ROWS)  # rounded up
        first_batch = batches * self.index // self.count
        end_batch = batches * (self.index + 1) // self.count
        return range(first_batch * ROWS, min(end_batch * ROWS, total))


class ShardWritten(Exception):
    """Raised in the place of a dataset that would have the rows of a shard alone.

    A dataset checks, counts and packs its rows, which a part of them need not allow.

    Args:
        record: source, fingerprints, counts, files and checksum of the rows, for the manifest.
    """

    def __init__(self, record: dict[str, Any]) -> None:
        super().__init__(f"the rows of {record['source']} were written to a shard")
        self.record = record


_shard: ContextVar[Shard | None] = ContextVar("shard", default=None)


@contextmanager
def preparing_shard(output: Path, shard: Shard) -> Iterator[None]:
    """Make datasets write the rows of a shard inside the block and raise :class:`ShardWritten`."""
    token = _shard.set(shard)
    try:
        with preparing(shard.folder(output)):
            yield
    finally:
        _shard.reset(token)


def current_shard() -> Shard | None:
    """Return the shard of the active :func:`preparing_shard` block."""
    return _shard.get()
