"""Garbage collection during start-up."""

import gc

_RAISED_THRESHOLD = 100_000
_default_thresholds: tuple[int, int, int] | None = None


def reduce_garbage_collection() -> None:
    """Run Python's garbage collector rarely until :func:`restore_garbage_collection`.

    Imports create a million long-lived objects. With the default threshold of 700, collections took a fifth of the time
    to the first step. The training loop needs the default, because cycles may hold activations.
    """
    global _default_thresholds
    if _default_thresholds is None:
        _default_thresholds = gc.get_threshold()
        gc.set_threshold(_RAISED_THRESHOLD, *_default_thresholds[1:])


def restore_garbage_collection() -> None:
    """Undo :func:`reduce_garbage_collection`, if it was called."""
    global _default_thresholds
    if _default_thresholds is not None:
        gc.set_threshold(*_default_thresholds)
        _default_thresholds = None
