"""Errors that are shown to the user without a traceback, and the guard of observers, which may fail during a run."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar, TypeVar

from torchtune.utils._logging import get_logger

T = TypeVar("T")

# Exit code of a run that the same command resumes: EX_TEMPFAIL of sysexits.h, upon which schedulers can be set to
# requeue the job.
EXIT_REQUEUE = 75
# Exit code of a stalled rank; neither torch nor Python uses it.
HANG_EXIT_CODE = 76


class UserError(Exception):
    """Error in the user's input: configuration, data, checkpoint or machine.

    The message is one sentence on the error, its place and the remedy. The command line prints it without a
    traceback and exits with ``exit_code``. Packages derive their own classes (``CheckpointError``, ``DataError`` …).
    """

    exit_code: ClassVar[int] = 2
    raised_on_all: bool = False  # every rank raises the error, so it is printed once


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error, or its class name if the message is empty."""
    line = str(error).strip().partition("\n")[0].rstrip(". ")
    if not line:
        return type(error).__name__
    return line


class LostRankError(RuntimeError):
    """Error of a rank that must stop because another rank is lost or has failed.

    Args:
        message: one sentence with the lost rank and the remedy.
        exit_code: exit code of this process: ``EXIT_REQUEUE`` if the same command can resume the run, 2 after a user
            error on the other rank, otherwise 1.

    Attributes:
        is_reported: whether the lost rank has already printed the error on this machine.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.is_reported = False


class ObserverGuard:
    """Calls code that only watches a run; if it raises, the guard warns once, and the run goes on.

    Loggers, reports, progress bars, profilers and figures of memory and speed are called through a guard each. An
    observer that failed is called again the next time, because a server may come back or a disk may be emptied. After
    ``patience`` seconds of failures, it is left out for the rest of the run: a server that is gone can cost minutes per
    call until its client gives up.

    ``KeyboardInterrupt``, ``SystemExit`` and the error of a lost rank pass through. A guarded call must not
    communicate with other ranks, because they would wait for a rank that leaves it early; see
    :func:`torchtune.supervision.observe_together`.

    Args:
        name: the observer, as the subject of the warning, for example ``"metric_logger WandBLogger"``.
        patience: seconds that failing calls may take in total.

    Attributes:
        has_failed: whether a call has failed.
        is_left_out: whether the observer is not called any more.

    Example:
        >>> guard = torchtune.utils.ObserverGuard("metric_logger")
        >>> guard.call(lambda: 1 + 1)
        2
    """

    def __init__(self, name: str, patience: float = 30.0) -> None:
        self._name = name
        self._patience = patience
        self._seconds_lost = 0.0
        self.has_failed = False

    @property
    def is_left_out(self) -> bool:
        return self._seconds_lost > self._patience

    def call(self, function: Callable[[], T], default: T | None = None) -> T | None:
        """Return the result of ``function``, or ``default`` if it raises or the observer is left out."""
        if self.is_left_out:
            return default
        start = time.monotonic()
        try:
            return function()
        except LostRankError:  # the run cannot go on
            raise
        except Exception as error:  # noqa: BLE001  (whatever the code of a user or of another library raises)
            self._seconds_lost += time.monotonic() - start
            self.warn(error)
            return default

    def warn(self, error: BaseException) -> None:
        """Log the first error as a warning, with its traceback at level DEBUG; later errors are not logged."""
        if self.has_failed:
            return
        self.has_failed = True
        reason = type(error).__name__
        if str(error).strip():
            reason += f": {first_line(error)}"
        get_logger().warning(f"{self._name} failed ({reason}): the run goes on without it.")
        get_logger().debug(f"{self._name} failed here:", exc_info=error)


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Context manager that restores the global generators of Python, NumPy and torch (on CPU) after the block.

    A run must draw the same numbers whatever logger it has. It takes 0.1 ms, and accelerators are not touched.
    """
    import numpy as np
    import torch

    python_state = random.getstate()
    numpy_state = np.random.get_state()
    torch_state = torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
