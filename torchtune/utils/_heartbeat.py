"""Progress of the process, for the watchdog and error messages."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

# Phases in which the loop itself reports heartbeats; in other phases, work of the main thread counts as a heartbeat.
LOOP_PHASES = ("training", "validation", "loading data", "loading ahead")


class Activity:
    """Progress of a run, written by its main thread and read by other threads without a lock.

    Attributes:
        step: completed optimizer steps; ``None`` before the loop.
        phase: name of the current phase.
        moves: number of progress marks, equal on all ranks at the same point of the program.
        signs: number of other heartbeats, which differ between ranks.
        moved: time of the last mark or heartbeat (``time.monotonic``).
        written: number of tensors written to checkpoints by any thread; not a heartbeat of the loop.
        row: name of the row of data that is prepared; empty between rows.
        shape: shape of the last tokens passed to the model.

    Example:
        >>> activity = torchtune.utils.Activity(step=3)
        >>> activity.move("validation")
        >>> activity.phase
        'validation'
    """

    def __init__(self, step: int | None = 0, phase: str = "training") -> None:
        self.step = step
        self.phase = phase
        self.moves = 0
        self.signs = 0
        self.moved = time.monotonic()
        self.written = 0
        self.row = ""
        self.shape: tuple[int, ...] | None = None

    def move(self, phase: str | None = None) -> None:
        """Count a progress mark, and enter ``phase`` unless it is None."""
        if phase is not None:
            self.phase = phase
        self.moves += 1
        self.row = ""
        self.moved = time.monotonic()

    def sign(self, row: str = "") -> None:
        """Count a heartbeat, and note the row that begins, if any."""
        self.signs += 1
        self.row = row
        self.moved = time.monotonic()

    def __str__(self) -> str:
        return place(self.step, self.phase)


def place(step: int | None, phase: str) -> str:
    """Describe a point of the run, after ``step`` completed steps: "in step 8", "saving after step 7", "set-up" …

    Example:
        >>> torchtune.utils.place(7, "training")
        'in step 8'
    """
    if step is None:
        return phase
    if phase == "training":
        return f"in step {step + 1}"
    if phase == "loading ahead":
        return f"loading data for step {step + 2}"
    if phase == "loading data":
        return f"loading data for step {step + 1}"
    return f"{phase} after step {step}"


_watched_activity: Activity | None = None


def watched_activity() -> Activity | None:
    """Return the activity set by :func:`watch_activity` in this process, or ``None``."""
    return _watched_activity


@contextmanager
def watch_activity(activity: Activity) -> Iterator[None]:
    """Context manager in which :func:`doing` and :func:`sign_of_life` write to ``activity``."""
    global _watched_activity
    outer_activity = _watched_activity
    _watched_activity = activity
    try:
        yield
    finally:
        _watched_activity = outer_activity


@contextmanager
def doing(phase: str) -> Iterator[None]:
    """Context manager that names the current phase for the watchdog's message; all ranks must enter it.

    Args:
        phase: name of the phase, for example ``"loading the checkpoint"``.
    """
    activity = _watched_activity
    if activity is None:
        yield
        return
    outer_phase = activity.phase
    activity.move(phase)
    try:
        yield
    finally:
        activity.move(outer_phase)


def sign_of_life(row: str = "") -> None:
    """Send a heartbeat to the watchdog, if any, from inside a long loop.

    Args:
        row: name of the row of data that begins; until the next heartbeat, only the end of the row counts as progress.
    """
    if _watched_activity is not None:
        _watched_activity.sign(row)
