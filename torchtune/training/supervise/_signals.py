"""Stopping a run without losing it."""

import itertools
import os
import signal
from types import FrameType, TracebackType

from torchtune.utils import get_logger

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignal:
    """Inside the block, the first SIGINT or SIGTERM only sets ``requested``; the second one ends at once.

    The loop looks at ``requested`` after every step, saves and leaves. The handlers that were there before come
    back at the end of the block and after the first signal. A process that torchrun started hears of a signal twice,
    from the scheduler and from torchrun, which kills it when its time is up: there, a second one does not count. Only
    the main thread can be told of signals; elsewhere ``requested`` stays False.
    """

    def __init__(self) -> None:
        self.number: signal.Signals | None = None
        self._count = itertools.count()
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopSignal":
        for number in _SIGNALS:
            try:
                self._previous[number] = signal.signal(number, self._handle)
            except ValueError:  # not in the main thread
                break
        return self

    @property
    def requested(self) -> bool:
        """Whether there was a signal; ``number`` says which."""
        return self.number is not None

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if next(self._count):  # in one step of the interpreter: a second signal may come inside of this function
            return
        self.number, hint = signal.Signals(number), ""
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            self._restore()
            hint = "; send it again to end at once"
        get_logger().warning(f"{self.number.name}: the run saves and stops after this step{hint}.")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()
