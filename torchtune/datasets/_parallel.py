"""Work on the rows of a dataset in several processes."""

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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from torchtune.data import DataError
from torchtune.utils import UserError, get_logger

Part = TypeVar("Part")

ROWS = 256  # of a part
_FEW = 2048  # rows that are done before processes have started
_MOST = 16  # processes, unless more are asked for
_asked: ContextVar[int | None] = ContextVar("workers", default=None)


@contextmanager
def workers(count: int | None) -> Iterator[None]:
    """Inside the block rows are worked on in ``count`` processes; None: one for every core."""
    token = _asked.set(count)
    try:
        yield
    finally:
        _asked.reset(token)


def processes() -> int:
    """Processes that rows are worked on in; 1: this one alone, as no other may be started, or none helps."""
    if multiprocessing.current_process().daemon or not hasattr(os, "fork"):
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return _asked.get() or min(cores, _MOST)


class ProcessKilled(DataError):
    """A process that worked on rows is gone."""


def in_parts(rows: Any, work: Callable[[int, Any], Part], first: int = 0) -> Iterator[Part]:
    """``work(start, rows)`` of consecutive parts of ``rows``, in order, from row ``first`` on.

    Few rows are worked on here. Many are in forked processes, which share what this one has in memory; only what
    ``work`` returns is copied.

    Raises:
        ProcessKilled: a process was killed.
    """
    starts = range(first, len(rows), ROWS)
    if len(rows) - first <= _FEW or processes() == 1:
        yield from _alone(rows, work, starts)
        return
    yield work(first, _part(rows, first))  # what it learns on the way is there for all
    pool = _pool(rows, work)
    if pool is None:
        yield from _alone(rows, work, starts[1:])
        return
    waiting: deque[Future[Part]] = deque()
    try:
        for start in starts[1:]:
            waiting.append(pool.submit(_do, start))
            if len(waiting) > 4 * processes():
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise ProcessKilled(
            "A process that prepares rows was killed, most likely because memory ran out: free some, or use fewer "
            "processes (tune data prepare --workers 1)."
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _alone(rows: Any, work: Callable[[int, Any], Part], starts: Iterable[int]) -> Iterator[Part]:
    with _set_aside():
        yield from (work(start, _part(rows, start)) for start in starts)


@contextmanager
def _set_aside() -> Iterator[None]:
    """Inside the block the garbage collector does not look through the objects that are there: torch alone has many."""
    if gc.get_freeze_count():  # somebody else does this
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _pool(rows: Any, work: Callable[[int, Any], Any]) -> ProcessPoolExecutor | None:
    """Processes that have started; None, and a warning, where the system lets no more of them start."""
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(processes(), multiprocessing.get_context("fork"), _begin, (rows, work, os.getpid()))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
            pool.submit(os.getpid)  # starts all
    except OSError as error:
        for process in set(multiprocessing.active_children()) - before:  # nothing else ends them
            process.kill()
            process.join()
        get_logger().warning(
            f"{processes()} processes cannot be started to work on rows ({error.strerror}): this one does it alone."
        )
        return None
    return pool


def _part(rows: Any, start: int) -> Any:
    end = min(start + ROWS, len(rows))
    return rows.select(range(start, end)) if hasattr(rows, "select") else rows[start:end]


_work: tuple[Any, Callable[[int, Any], Any]]


def _begin(rows: Any, work: Callable[[int, Any], Any], parent: int) -> None:
    """Runs first in every process."""
    global _work  # inherited, never copied
    _work = rows, work
    gc.freeze()  # likewise, and pages that are shared with the parent stay shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends them
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()


def end_with(parent: int) -> None:
    """End this process when its parent has ended, however it did."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _do(start: int) -> Any:
    rows, work = _work
    try:
        return work(start, _part(rows, start))
    except Exception as error:  # noqa: BLE001  (one that cannot be pickled looks like a process that was killed)
        raise that_travels(error) from None


def that_travels(error: Exception) -> Exception:
    """An error that can be pickled, with where it was raised unless it is the user's."""
    shown = "".join(traceback.format_exception(error))
    try:
        found = pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  (errors with a constructor of their own)
        found = RuntimeError(f"{type(error).__name__}: {error}")
    if not isinstance(error, UserError) and hasattr(found, "add_note"):  # since Python 3.11
        found.add_note(f"In another process:\n{shown}")
    return found
