"""Signals that stop a run."""

# This file imports no torch, so that the package exports StopSignal without loading it.

import itertools
import os
import signal
from types import FrameType

from torchtune.utils import get_logger


class StopSignal:
    """Context manager: the first SIGINT or SIGTERM sets ``requested``; the second ends the process.

    The loop reads ``requested`` after every step. The first signal and the end of the block restore the previous
    handlers. torchrun repeats the scheduler's signal, so under torchrun the second one is ignored; torchrun itself
    kills the process after its grace period. Outside the main thread, ``requested`` stays False.

    Example:
        >>> with torchtune.supervision.StopSignal() as stop:
        ...     stop.requested
        False
    """

    def __init__(self) -> None:
        self.number: signal.Signals | None = None
        self._count = itertools.count()
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopSignal":
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._previous[number] = signal.signal(number, self._handle)
            except ValueError:  # not in the main thread
                break
        return self

    @property
    def requested(self) -> bool:
        """Whether a signal was received; ``number`` is the signal."""
        return self.number is not None

    def _restore(self) -> None:
        """Restore the handlers of before."""
        for number, handler in self._previous.items():
            if handler is None:  # not set by Python
                handler = signal.SIG_DFL
            signal.signal(number, handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Take note of the first signal, and let the next one end the process."""
        if next(self._count):  # atomic: a second signal may interrupt this function
            return
        self.number = signal.Signals(number)
        hint = ""
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            self._restore()
            hint = "; send it again to end at once"
        get_logger().warning(f"{self.number.name}: the run saves and stops after this step{hint}.")

    def __exit__(self, *_: object) -> None:
        self._restore()
