"""Work that is done ahead by a process of its own."""

import itertools
import multiprocessing
import os
import pickle
import queue
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
from torchtune.datasets._parallel import end_with, that_travels
from torchtune.utils import Activity, sign_of_life, watch_activity


class Ahead:
    """A copy of an object in a forked process. Its methods are called there, in the order in which they are asked for.

    The process begins with what is in memory here, and keeps it: make it before the weights are there. It ends with
    this object, and with this process however that ends. A copy of this object is None.

    Args:
        target: what has the methods. What they take and return is pickled.
        work: what the process does, for messages.
        way_out: what to do where it is killed, for messages.
    """

    def __init__(self, target: Any, work: str, way_out: str) -> None:
        context = multiprocessing.get_context("fork")
        self._connection, other = context.Pipe()
        self._owner = os.getpid()
        arguments = (target, other, self._connection, self._owner)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
            self._process.start()
        other.close()
        self._said = f"The process that {work} was killed, most likely because memory ran out: {way_out}."
        self._tickets = itertools.count()
        self._answers: dict[int, tuple[Any, Exception | None]] = {}
        self._forgotten = 0  # tickets below are of no interest
        # Before daemons are asked to end when the interpreter does: this one does not listen.
        util.Finalize(self, _end, (self._process, self._connection), exitpriority=100)

    def __reduce__(self) -> Any:
        return type(None), ()

    @property
    def is_here(self) -> bool:
        """Whether this process made it, not one that was forked later."""
        return os.getpid() == self._owner

    def tell(self, method: str, arguments: tuple[Any, ...]) -> None:
        """Have a method called; nothing comes back."""
        self._send([(None, method, arguments)])

    def ask(self, method: str, calls: Sequence[tuple[Any, ...]]) -> list[int]:
        """Have a method called with some arguments after others. Returns a ticket for :meth:`answer` of each call."""
        tickets = [next(self._tickets) for _ in calls]
        self._send([(ticket, method, arguments) for ticket, arguments in zip(tickets, calls, strict=True)])
        return tickets

    def forget(self) -> None:
        """Drop all that was asked for, also what is being worked on."""
        self._forgotten = next(self._tickets)
        self._answers.clear()
        self._send([(self._forgotten, None, ())])

    def answer(self, ticket: int) -> Any:
        """What the method returned, once; waits for it.

        Raises:
            DataError: the process was killed.
            Exception: what the method raised.
        """
        while ticket not in self._answers:
            try:
                while not self._connection.poll(1.0):
                    if not self._process.is_alive():
                        raise EOFError
                self._take()
            except (EOFError, OSError) as error:
                raise DataError(self._said) from error
        value, failure = self._answers.pop(ticket)
        if failure is not None:
            raise failure
        return value

    def _send(self, calls: Any) -> None:
        try:
            while self._connection.poll():  # so that the process goes on
                self._take()
            self._connection.send_bytes(pickle.dumps(calls))
        except (EOFError, OSError):
            pass  # the next answer tells

    def _take(self) -> None:
        ticket, value, failure = pickle.loads(self._connection.recv_bytes())
        if ticket is None:
            sign_of_life()
        elif ticket >= self._forgotten:
            self._answers[ticket] = (value, failure)


class _Forgotten(BaseException):
    """Nobody waits for this answer any more."""


class _Signs(Activity):
    """Sends signs of life to the parent, whose watchdog asks for them; ends work that it has forgotten.

    Attributes:
        ticket: of the call that is worked on.
        forgotten: tickets below are of no interest.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection
        self.ticket: int | None = None
        self.forgotten = 0

    def sign(self) -> None:
        """Send one, at most every second."""
        if self.ticket is not None and self.ticket < self.forgotten:
            raise _Forgotten
        if time.monotonic() > self.moved + 1:
            super().sign()
            self._connection.send_bytes(pickle.dumps((None, None, None)))


def _end(process: Any, connection: Connection) -> None:
    process.kill()
    process.join()
    connection.close()


def _serve(target: Any, connection: Connection, other: Connection, parent: int) -> None:
    """What the process does."""
    other.close()
    for number in (signal.SIGINT, signal.SIGTERM):  # of the whole group: the parent may still save
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    torch.set_num_threads(1)
    asked: queue.SimpleQueue[tuple[int | None, str, Any]] = queue.SimpleQueue()
    signs = _Signs(connection)
    threading.Thread(target=_listen, args=(connection, asked, signs), daemon=True).start()
    with watch_activity(signs):
        while True:
            signs.ticket, method, arguments = asked.get()
            value, failure = None, None
            try:
                signs.sign()
                value = getattr(target, method)(*arguments)
            except Exception as error:  # noqa: BLE001  (is raised where the answer is read)
                failure = that_travels(error)
            except _Forgotten:
                continue
            if signs.ticket is not None:
                connection.send_bytes(pickle.dumps((signs.ticket, value, failure), protocol=5))


def _listen(connection: Connection, asked: Any, signs: _Signs) -> None:
    """Take what is asked for off the connection, so that the parent never waits for this process."""
    try:
        while True:
            for ticket, method, arguments in pickle.loads(connection.recv_bytes()):
                if method is None:
                    signs.forgotten = ticket
                else:
                    asked.put((ticket, method, arguments))
    except (EOFError, OSError):
        os._exit(0)
