"""What a process is doing, for the watchdog and error messages."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

# Phases of the loop, which reports its own signs of life; in other phases, any progress of the code is one.
LOOP_PHASES = ("training", "validation", "loading data", "loading ahead")


class Activity:
    """Written by the run, read by other threads, without a lock.

    Attributes:
        step: completed optimizer steps; None before the loop.
        phase: name of the current phase.
        moves: count of steps of the program, equal on all ranks at the same point.
        signs: count of other signs of life, which differ between ranks.
        moved: time of the last of both (``time.monotonic``).
        shape: of the last tokens that the model was given.

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
        self.shape: tuple[int, ...] | None = None

    def move(self, phase: str | None = None) -> None:
        """Count a step of the program, perhaps with the beginning of a phase."""
        if phase is not None:
            self.phase = phase
        self.moves += 1
        self.moved = time.monotonic()

    def sign(self) -> None:
        """Count another sign of life."""
        self.signs += 1
        self.moved = time.monotonic()

    def __str__(self) -> str:
        return place(self.step, self.phase)


def place(step: int | None, phase: str) -> str:
    """Where in the run ``phase`` is, when ``step`` steps are done: "in step 8", "saving after step 7", "set-up" …"""
    if step is None:
        return phase
    if phase == "training":
        return f"in step {step + 1}"
    if phase == "loading ahead":
        return f"loading data for step {step + 2}"
    return f"{phase} for step {step + 1}" if phase == "loading data" else f"{phase} after step {step}"


_watched: Activity | None = None


def watched_activity() -> Activity | None:
    """The activity of the run that is watched in this process, if one is."""
    return _watched


@contextmanager
def watch_activity(activity: Activity) -> Iterator[None]:
    """Inside the block, :func:`doing` and :func:`sign_of_life` write to ``activity``."""
    global _watched
    before, _watched = _watched, activity
    try:
        yield
    finally:
        _watched = before


@contextmanager
def doing(phase: str) -> Iterator[None]:
    """Name what goes on inside the block, for the message of a watchdog; all ranks enter it.

    Args:
        phase: for example ``"loading the checkpoint"``.
    """
    activity = _watched
    if activity is None:
        yield
        return
    before = activity.phase
    activity.move(phase)
    try:
        yield
    finally:
        activity.move(before)


def sign_of_life() -> None:
    """Tell a watchdog, if there is one, that this process gets on: for loops that take long."""
    if _watched is not None:
        _watched.sign()
