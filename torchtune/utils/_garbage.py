"""Python's garbage collector while a program starts."""

import gc

_SELDOM = 100_000
_usual: tuple[int, int, int] | None = None


def collect_seldom() -> None:
    """Look for garbage seldom until :func:`collect_as_usual`.

    For the start of a program: imports make a million objects that stay, and to look through them each time 700 were
    added took a fifth of the time to the first step. In the loop, cycles may hold activations, and must not wait.
    """
    global _usual
    if _usual is None:
        _usual = gc.get_threshold()
        gc.set_threshold(_SELDOM, *_usual[1:])


def collect_as_usual() -> None:
    """End :func:`collect_seldom`; without it, nothing happens."""
    global _usual
    if _usual is not None:
        gc.set_threshold(*_usual)
        _usual = None
