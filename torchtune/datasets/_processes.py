"""Parallel work on rows in forked processes."""

import gc
import itertools
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
from contextlib import contextmanager
from contextvars import ContextVar
from multiprocessing import util
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

from torchtune.data import DataError
from torchtune.utils import Activity, UserError, get_logger, sign_of_life, watch_activity

Result = TypeVar("Result")

ROWS = 256  # per part
_FEW = 2048  # rows that are processed faster than processes start
_MOST = 16  # default maximum number of processes
_AHEAD = 4  # maximum number of parts requested from a worker at a time
_num_workers: ContextVar[int | None] = ContextVar("workers", default=None)


@contextmanager
def workers(count: int | None) -> Iterator[None]:
    """Set the number of processes for rows inside the block; None: one per core, at most 16."""
    token = _num_workers.set(count)
    try:
        yield
    finally:
        _num_workers.reset(token)


def processes() -> int:
    """Return the number of processes for rows; 1 means this process alone, for example in a daemon."""
    if multiprocessing.current_process().daemon or not hasattr(os, "fork"):
        return 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:  # macOS
        cores = os.cpu_count() or 1
    return _num_workers.get() or min(cores, _MOST)


def in_parts(rows: Any, work: Callable[[int, Any], Result], first: int = 0, end: int | None = None) -> Iterator[Result]:
    """Yield ``work(start, rows)`` of consecutive parts of ``rows``, in order, from row ``first`` to before ``end``.

    A small number of rows is processed in this process, larger numbers in forked processes.

    Raises:
        ProcessKilled: a process was killed.
    """
    if end is None:
        end = len(rows)

    def work_on_part(start: int) -> Result:
        end_of_part = min(start + ROWS, end)
        if hasattr(rows, "select"):  # rows of files, or a datasets.Dataset
            return work(start, rows.select(range(start, end_of_part)))
        return work(start, rows[start:end_of_part])

    starts = range(first, end, ROWS)
    pool: list[Worker] = []
    if end - first > _FEW and processes() > 1:
        yield work_on_part(first)  # before the fork, so that workers inherit the filled caches
        starts = starts[1:]
        pool = _start_workers(work_on_part)
    if not pool:
        yield from map(work_on_part, starts)
        return
    requests: deque[tuple[int, Worker, int]] = deque()
    try:
        # Every worker has a few requests ahead, and results are yielded in the order of the rows.
        for start, worker in zip(starts, itertools.cycle(pool), strict=False):
            if len(requests) == _AHEAD * len(pool):  # so that results do not fill the memory
                yield _wait_for_result(*requests.popleft())
            requests.append((start, worker, worker.ask(start)))
        while requests:
            yield _wait_for_result(*requests.popleft())
    finally:
        for worker in pool:
            worker.end()


def _wait_for_result(start: int, worker: "Worker", ticket: int) -> Any:
    """Return the result of the rows from ``start`` on; meanwhile the watchdog knows which rows they are."""
    sign_of_life(f"rows {start} to {start + ROWS - 1}")
    result = worker.answer(ticket)
    sign_of_life()
    return result


def _start_workers(work: Callable[[int], Any]) -> list["Worker"]:
    """Start workers; return none, with a warning, if the system cannot start processes."""
    advice = "free some, or use fewer processes (tune data prepare --workers 1)"
    pool: list[Worker] = []
    try:
        for _ in range(processes()):
            pool.append(Worker(work, "prepares rows", advice))
    except OSError as error:
        for worker in pool:
            worker.end()
        get_logger().warning(
            f"{processes()} processes cannot be started to work on rows ({error.strerror}): this one does it alone."
        )
        return []
    return pool


class ProcessKilled(DataError):
    """Raised when a process that works on rows was killed."""


class Worker:
    """Forked process that calls a function in the order of the requests.

    The fork keeps the memory of its parent: create it before the model. The process exits when this object is deleted
    or the parent exits, even if the parent is killed. Copies and pickles of this object are None.

    Args:
        work: the function; its arguments and results are pickled.
        name: task of the process for messages, for example ``"tokenizes rows.jsonl"``.
        advice: advice in the message if the process was killed.

    Attributes:
        end: function that ends the process.
    """

    def __init__(self, work: Callable[..., Any], name: str, advice: str) -> None:
        context = multiprocessing.get_context("fork")
        self._killed_message = f"The process that {name} was killed, most likely because memory ran out: {advice}."
        self._owner = os.getpid()
        self._calls = context.Queue()
        self._calls.cancel_join_thread()  # this process exits without waiting until the worker has read all calls
        self._answers, worker_end = context.Pipe(duplex=False)
        # Calls with lower tickets are canceled. No lock: only this process writes the number.
        self._first_valid_ticket = context.Value("q", 0, lock=False)
        self._tickets = itertools.count()
        self._received: dict[int, tuple[Any, Exception | None]] = {}  # (result, error) by ticket, until it is asked for
        arguments = (work, self._calls, worker_end, self._first_valid_ticket, self._owner)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # fork of a multi-threaded process
            self._process.start()
        worker_end.close()  # the worker has its copy: the pipe ends when the worker exits
        # Run before multiprocessing sends SIGTERM to daemons at exit, which this process ignores.
        self.end = util.Finalize(self, _end, (self._process,), exitpriority=100)

    def __reduce__(self) -> Any:
        return type(None), ()

    @property
    def is_here(self) -> bool:
        """Whether the current process, and not its parent, created this object."""
        return os.getpid() == self._owner

    def ask(self, *arguments: Any) -> int:
        """Request a call; return its ticket for :meth:`answer`."""
        ticket = next(self._tickets)
        self._calls.put((ticket, arguments))
        return ticket

    def cancel(self) -> None:
        """Cancel all requested calls, including the running one, and drop their answers."""
        self._first_valid_ticket.value = next(self._tickets)
        self._received.clear()

    def answer(self, ticket: int) -> Any:
        """Wait for a call and return its result; each ticket is valid once.

        Raises:
            ProcessKilled: the process was killed.
            Exception: the function raised it.
        """
        while ticket not in self._received:
            self._receive()
        value, failure = self._received.pop(ticket)
        if failure is not None:
            raise failure
        return value

    def drain(self) -> None:
        """Receive available answers, so that the worker process is not blocked."""
        while self._answers.poll():
            self._receive()

    def _receive(self) -> None:
        """Wait for a message of the worker process: a heartbeat, or an answer, which is kept unless it is canceled."""
        try:
            while not self._answers.poll(1.0):
                if not self._process.is_alive():
                    raise EOFError
            ticket, *answer = self._answers.recv()
        except (EOFError, OSError) as error:
            raise ProcessKilled(self._killed_message) from error
        if ticket is None:  # a heartbeat
            sign_of_life()
        elif ticket >= self._first_valid_ticket.value:
            self._received[ticket] = tuple(answer)


class _Canceled(BaseException):
    """Raised in the worker process to abort a canceled call."""


class _Heartbeat(Activity):
    """Heartbeat of the worker process for the parent's watchdog; also aborts canceled calls.

    Args:
        answers: pipe to the parent.
        first_valid_ticket: shared number; calls with lower tickets are canceled.

    Attributes:
        ticket: ticket of the running call.
    """

    def __init__(self, answers: Connection, first_valid_ticket: Any) -> None:
        super().__init__()
        self._answers = answers
        self._first_valid_ticket = first_valid_ticket
        self.ticket = 0

    def sign(self, row: str = "") -> None:
        """Send a heartbeat, at most one per second; raise :class:`_Canceled` if the running call is canceled."""
        if self.ticket < self._first_valid_ticket.value:
            raise _Canceled
        if time.monotonic() > self.moved + 1:
            super().sign(row)
            self._answers.send((None,))


def _end(process: Any) -> None:
    """End a worker process; a function of the module, because the object is gone when it is called."""
    process.kill()
    process.join()


def _serve(work: Callable[..., Any], calls: Any, answers: Connection, first_valid_ticket: Any, parent: int) -> None:
    """Run the worker process: answer calls of ``work`` in their order, until the parent ends it or exits.

    Args:
        work: the function.
        calls: queue of (ticket, arguments).
        answers: pipe for (ticket, result, error).
        first_valid_ticket: shared number; calls with lower tickets are canceled.
        parent: id of the parent process.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole process group; the parent may still save
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    torch.set_num_threads(1)  # there is a worker for each core
    gc.freeze()  # keep pages shared with the parent: a collection would write to all objects
    heartbeat = _Heartbeat(answers, first_valid_ticket)
    with watch_activity(heartbeat):
        while True:
            heartbeat.ticket, arguments = calls.get()
            value = None
            failure = None
            try:
                heartbeat.sign()  # raises if the call was canceled while it waited
                value = work(*arguments)
            except Exception as error:  # noqa: BLE001  (raised where the answer is read)
                failure = picklable_error(error)
            except _Canceled:  # a BaseException, so that `work` cannot catch it; nobody waits for an answer
                continue
            answers.send((heartbeat.ticket, value, failure))


def end_with(parent: int) -> None:
    """Exit this process when its parent has exited, even if the parent was killed."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def picklable_error(error: Exception) -> Exception:
    """Return an error that can be pickled, with its traceback as a note unless it is a :class:`UserError`."""
    stack = "".join(traceback.format_exception(error))
    try:
        copied = pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  (errors with a custom constructor)
        copied = RuntimeError(f"{type(error).__name__}: {error}")
    if not isinstance(error, UserError) and hasattr(copied, "add_note"):  # since Python 3.11
        copied.add_note(f"In another process:\n{stack}")
    return copied
