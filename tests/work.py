"""Limits of the work that a test allows: the same numbers on every machine, however slow or busy it is."""

import resource
import sys
import tracemalloc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def at_most(steps: int, mib: int | None = None) -> Iterator[None]:
    """Raise ``AssertionError`` in a block that calls too many functions or allocates too much memory.

    Args:
        steps: number of calls and returns, of functions of Python and C, in this thread. Imports are counted.
        mib: peak of the memory allocated by Python and NumPy, in MiB; None does not measure it, which is faster.
    """
    left = iter(b"\1" * steps)  # counts down without allocating, as tracemalloc slows down every allocation

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if not next(left, 0):
            sys.setprofile(None)
            raise AssertionError(f"more than {steps:,} calls and returns, the last one in {frame.f_code.co_name}")

    if mib is not None:
        tracemalloc.start()
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)
        peak = tracemalloc.get_traced_memory()[1] / 2**20
        tracemalloc.stop()
    assert next(left, 0), f"more than {steps:,} calls and returns"  # the error above may have been caught
    assert mib is None or peak <= mib, f"{peak:.0f} MiB at a time"


def outermost(events: Iterable[Any], name: str) -> list[Any]:
    """Return a profile's events of an operator, without those that it calls itself, for example on another device."""
    outer_events = []
    for event in events:
        parent = event.cpu_parent
        while parent is not None and parent.name != name:
            parent = parent.cpu_parent
        if event.name == name and parent is None:
            outer_events.append(event)
    return outer_events


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Refuse writes beyond ``size`` bytes of a file in the block, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
