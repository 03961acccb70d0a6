"""Tokens per second."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Throughput:
    """Tokens per second over the last steps: all that were processed, and those that carry a label.

    Time inside ``paused`` (saving, validation) does not count.

    Args:
        window: steps that the figures are taken over.
        clock: seconds, monotonic.
    """

    def __init__(self, window: int = 10, clock: Callable[[], float] = time.perf_counter) -> None:
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}.")
        self._clock = clock
        self._window: deque[tuple[float, int, int]] = deque(maxlen=window)
        self._mark = clock()
        self.processed = 0
        self.trained = 0

    def step(self, *, processed: int, trained: int) -> None:
        """Count one optimizer step.

        Args:
            processed: tokens that went through the model.
            trained: tokens that carry a label.
        """
        now = self._clock()
        self._window.append((now - self._mark, processed, trained))
        self._mark = now
        self.processed += processed
        self.trained += trained

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time inside the block out."""
        start = self._clock()
        try:
            yield
        finally:
            self._mark += self._clock() - start

    def metrics(self) -> dict[str, float]:
        """``tokens_per_second_per_gpu`` (processed) and ``trained_tokens_per_second`` over the window."""
        seconds = sum(entry[0] for entry in self._window)
        if seconds <= 0:
            return {"tokens_per_second_per_gpu": 0.0, "trained_tokens_per_second": 0.0}
        return {
            "tokens_per_second_per_gpu": sum(entry[1] for entry in self._window) / seconds,
            "trained_tokens_per_second": sum(entry[2] for entry in self._window) / seconds,
        }
