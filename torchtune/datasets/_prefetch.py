"""Worker process that calls an object's methods in advance."""

import itertools
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Sequence
from multiprocessing import util
from multiprocessing.connection import Connection
from typing import Any

import torch

from torchtune.data import DataError
from torchtune.datasets._processes import end_with, that_travels
from torchtune.utils import Activity, sign_of_life, watch_activity


class Ahead:
    """Proxy of an object in a forked process, which calls the object's methods in the order of the requests.

    The fork keeps the memory of its parent: create it before the model. The process exits when this object is deleted
    or the parent exits, even if the parent is killed. Copies and pickles of this object are None.

    Args:
        target: object to fork; its methods' arguments and results are pickled.
        work: task of the process for messages, for example ``"tokenizes rows.jsonl"``.
        way_out: advice in the message if the process was killed.
    """

    def __init__(self, target: Any, work: str, way_out: str) -> None:
        context = multiprocessing.get_context("fork")
        self._said = f"The process that {work} was killed, most likely because memory ran out: {way_out}."
        self._owner = os.getpid()
        self._calls = context.Queue()
        self._calls.cancel_join_thread()  # drop unread calls at exit
        self._answers, other = context.Pipe(duplex=False)
        self._forgotten = context.Value("q", 0, lock=False)  # calls with lower tickets are canceled
        self._tickets = itertools.count()
        self._found: dict[int, tuple[Any, Exception | None]] = {}
        arguments = (target, self._calls, other, self._forgotten, self._owner)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # fork of a multi-threaded process
            self._process.start()
        other.close()
        # Run before multiprocessing sends SIGTERM to daemons at exit, which this process ignores.
        util.Finalize(self, _end, (self._process,), exitpriority=100)

    def __reduce__(self) -> Any:
        return type(None), ()

    @property
    def is_here(self) -> bool:
        """Whether the current process created this object, and is not a later fork."""
        return os.getpid() == self._owner

    def ask(self, method: str, calls: Sequence[tuple[Any, ...]]) -> list[int]:
        """Request a method call per tuple of arguments; return the ticket of each call for :meth:`answer`."""
        tickets = [next(self._tickets) for _ in calls]
        for ticket, arguments in zip(tickets, calls, strict=True):
            self._calls.put((ticket, method, arguments))
        return tickets

    def forget(self) -> None:
        """Cancel all requested calls, including the running one, and drop their answers."""
        self._forgotten.value = next(self._tickets)
        self._found.clear()

    def answer(self, ticket: int) -> Any:
        """Wait for a call and return its result; each ticket is valid once.

        Raises:
            DataError: the process was killed.
            Exception: the method raised it.
        """
        while ticket not in self._found:
            try:
                while not self._answers.poll(1.0):
                    if not self._process.is_alive():
                        raise EOFError
                found, *answer = self._answers.recv()
            except (EOFError, OSError) as error:
                raise DataError(self._said) from error
            if found is None:
                sign_of_life()
            elif found >= self._forgotten.value:
                self._found[found] = tuple(answer)
        value, failure = self._found.pop(ticket)
        if failure is not None:
            raise failure
        return value


class _Forgotten(BaseException):
    """Raised in the worker process to abort a canceled call."""


class _Signs(Activity):
    """Heartbeat of the worker process for the parent's watchdog; also aborts canceled calls.

    Attributes:
        ticket: ticket of the running call.
    """

    def __init__(self, answers: Connection, forgotten: Any) -> None:
        super().__init__()
        self._answers, self._forgotten = answers, forgotten
        self.ticket = 0

    def sign(self, row: str = "") -> None:
        """Send a heartbeat, at most one per second."""
        if self.ticket < self._forgotten.value:
            raise _Forgotten
        if time.monotonic() > self.moved + 1:
            super().sign(row)
            self._answers.send((None,))


def _end(process: Any) -> None:
    process.kill()
    process.join()


def _serve(target: Any, calls: Any, answers: Connection, forgotten: Any, parent: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the process group, but the parent may still save
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    torch.set_num_threads(1)
    signs = _Signs(answers, forgotten)
    with watch_activity(signs):
        while True:
            signs.ticket, method, arguments = calls.get()
            value, failure = None, None
            try:
                signs.sign()
                value = getattr(target, method)(*arguments)
            except Exception as error:  # noqa: BLE001  (is raised where the answer is read)
                failure = that_travels(error)
            except _Forgotten:
                continue
            answers.send((signs.ticket, value, failure))
