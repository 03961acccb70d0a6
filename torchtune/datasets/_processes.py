"""Parallel processing of a dataset's rows in forked processes."""

import gc
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from torchtune.data import DataError
from torchtune.utils import UserError, get_logger, sign_of_life

Part = TypeVar("Part")

ROWS = 256  # per part
_FEW = 2048  # rows that are processed faster than processes start
_MOST = 16  # default maximum number of processes
_asked: ContextVar[int | None] = ContextVar("workers", default=None)
# Inherited by the forked processes of a pool, so that rows and transforms are not pickled.
_parts: Callable[[int], Any]


@contextmanager
def workers(count: int | None) -> Iterator[None]:
    """Set the number of processes for rows inside the block; None: one per core, at most 16."""
    token = _asked.set(count)
    try:
        yield
    finally:
        _asked.reset(token)


def processes() -> int:
    """Return the number of processes for rows; 1 is this process alone, for example in a daemon."""
    if multiprocessing.current_process().daemon or not hasattr(os, "fork"):
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return _asked.get() or min(cores, _MOST)


class ProcessKilled(DataError):
    """Raised when a process that works on rows was killed."""


def in_parts(rows: Any, work: Callable[[int, Any], Part], first: int = 0) -> Iterator[Part]:
    """Yield ``work(start, rows)`` of consecutive parts of ``rows``, in order, from row ``first`` on.

    Few rows are processed in this process, many in forked ones.

    Raises:
        ProcessKilled: a process was killed.
    """

    def part(start: int) -> Part:
        end = min(start + ROWS, len(rows))
        return work(start, rows.select(range(start, end)) if hasattr(rows, "select") else rows[start:end])

    starts = deque(range(first, len(rows), ROWS))
    pool = None
    if len(rows) - first > _FEW and processes() > 1:
        yield part(starts.popleft())  # before the fork, so that all inherit the caches that it fills
        pool = _pool(part)
    if pool is None:
        yield from map(part, starts)
        return
    waiting: deque[tuple[int, Future[Part]]] = deque()
    try:
        while starts or waiting:
            while starts and len(waiting) <= 4 * processes():
                start = starts.popleft()
                waiting.append((start, pool.submit(_do, start)))
            yield _result(*waiting.popleft())
    except BrokenProcessPool as error:
        raise ProcessKilled(
            "A process that prepares rows was killed, most likely because memory ran out: free some, or use fewer "
            "processes (tune data prepare --workers 1)."
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _result(start: int, future: "Future[Part]") -> Part:
    sign_of_life(f"rows {start} to {start + ROWS - 1}")
    part = future.result()
    sign_of_life()
    return part


def _pool(part: Callable[[int], Any]) -> ProcessPoolExecutor | None:
    """Start a process pool; return None, with a warning, if the system cannot start processes."""
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(processes(), multiprocessing.get_context("fork"), _begin, (part, os.getpid()))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # fork of a multi-threaded process
            pool.submit(os.getpid)  # starts all processes
    except OSError as error:
        for process in set(multiprocessing.active_children()) - before:  # nothing else ends them
            process.kill()
            process.join()
        get_logger().warning(
            f"{processes()} processes cannot be started to work on rows ({error.strerror}): this one does it alone."
        )
        return None
    return pool


def _begin(part: Callable[[int], Any], parent: int) -> None:
    global _parts
    _parts = part
    gc.freeze()  # keep pages shared with the parent
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops its workers
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()


def end_with(parent: int) -> None:
    """Exit this process when its parent has exited, even if the parent was killed."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _do(start: int) -> Any:
    try:
        return _parts(start)
    except Exception as error:  # noqa: BLE001  (one that cannot be pickled looks like a process that was killed)
        raise that_travels(error) from None


def that_travels(error: Exception) -> Exception:
    """Return an error that can be pickled, with its traceback as a note unless it is a :class:`UserError`."""
    shown = "".join(traceback.format_exception(error))
    try:
        found = pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  (errors with a custom constructor)
        found = RuntimeError(f"{type(error).__name__}: {error}")
    if not isinstance(error, UserError) and hasattr(found, "add_note"):  # since Python 3.11
        found.add_note(f"In another process:\n{shown}")
    return found
