"""What a process is doing, for those who watch it."""

import time


class Activity:
    """Written by the loop as it goes, read by other threads; one assignment each, so that neither waits.

    Attributes:
        step: optimizer steps that are done.
        phase: what goes on.
        moves: grows with every sign of life; the same on all ranks at the same point of the loop.
        moved: when it last did, as ``time.monotonic`` counts.
        shape: of the tokens that last went into the model.
    """

    def __init__(self, step: int = 0) -> None:
        self.step = step
        self.phase = "training"
        self.moves = 0
        self.moved = time.monotonic()
        self.shape: tuple[int, ...] | None = None

    def move(self, phase: str | None = None) -> None:
        """Show a sign of life, perhaps at the beginning of something else."""
        if phase is not None:
            self.phase = phase
        self.moves += 1
        self.moved = time.monotonic()

    def __str__(self) -> str:
        return place(self.step, self.phase)


def place(step: int, phase: str) -> str:
    """Where in the loop ``phase`` is, when ``step`` steps are done: "in step 8", "saving after step 7" …"""
    if phase == "training":
        return f"in step {step + 1}"
    if phase == "loading ahead":
        return f"loading data for step {step + 2}"
    return f"{phase} for step {step + 1}" if phase == "loading data" else f"{phase} after step {step}"
