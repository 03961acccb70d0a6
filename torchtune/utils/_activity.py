"""What a process is doing, for those who watch it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

# Phases of the loop, which show signs of life of their own; in others any progress of the code is one.
LOOP_PHASES = ("training", "validation", "loading data", "loading ahead")


class Activity:
    """Written by the run as it goes, read by other threads; one assignment each, so that neither waits.

    Attributes:
        step: optimizer steps that are done; None before the loop.
        phase: what goes on.
        moves: grows with every step of the program; the same on all ranks at the same point of it.
        stirs: grows with other signs of life, which may differ between ranks.
        moved: when one of both last did, as ``time.monotonic`` counts.
        shape: of the tokens that last went into the model.
    """

    def __init__(self, step: int | None = 0, phase: str = "training") -> None:
        self.step = step
        self.phase = phase
        self.moves = 0
        self.stirs = 0
        self.moved = time.monotonic()
        self.shape: tuple[int, ...] | None = None

    def move(self, phase: str | None = None) -> None:
        """Show a sign of life, perhaps at the beginning of something else."""
        if phase is not None:
            self.phase = phase
        self.moves += 1
        self.moved = time.monotonic()

    def stir(self) -> None:
        """Show a sign of life inside of what goes on."""
        self.stirs += 1
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
        _watched.stir()
