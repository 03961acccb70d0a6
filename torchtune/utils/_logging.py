"""Logging and deprecation notices."""

import functools
import inspect
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T", bound=Callable[..., Any])

SCREEN_FORMAT = "%(levelname)s:%(name)s:%(message)s"
_LOGGED_ONCE: dict[str, None] = {}


def get_logger(level: str | None = None) -> logging.Logger:
    """Return the library's logger (``"torchtune"``), with a stderr handler.

    Args:
        level: name of a level (``"DEBUG"``, ``"INFO"`` …) to set; ``None`` leaves it unchanged.

    Example:
        >>> torchtune.utils.get_logger().name
        'torchtune'
    """
    logger = logging.getLogger("torchtune")
    if not logger.hasHandlers():
        handler = _ScreenHandler()
        handler.setFormatter(logging.Formatter(SCREEN_FORMAT))
        logger.addHandler(handler)
    if level is not None:
        logger.setLevel(level.upper())
    return logger


@contextmanager
def above_bars(stream: Any) -> Iterator[None]:
    """Context manager for whole lines that are printed to ``stream``: progress bars move below them.

    Example:
        >>> import sys
        >>> with torchtune.utils.above_bars(sys.stdout):
        ...     print("step_10 was saved.")
        step_10 was saved.
    """
    tqdm = sys.modules.get("tqdm")  # without it, there is no bar
    bars = [] if tqdm is None else _bars_on(stream, tqdm.tqdm)
    for bar in bars:
        bar.clear(nolock=True)
    yield
    # Without tqdm's lock, which forked processes share: one that is killed while it holds the lock would stop the log.
    for bar in bars:
        bar.refresh(nolock=True)


def _bars_on(stream: Any, tqdm: type) -> list[Any]:
    try:
        bars = list(tqdm._instances)
    except RuntimeError:  # another thread makes a bar at this moment
        return []
    # Standard output and standard error usually show on the same screen.
    screens = (sys.stdout, sys.stderr)
    streams = screens if stream in screens else (stream,)
    return [bar for bar in bars if not bar.disable and bar.fp in streams]


class _ScreenHandler(logging.StreamHandler):
    """Prints to stderr, above a progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record."""
        with above_bars(self.stream):
            super().emit(record)


def get_rank() -> int:
    """Return this process's rank from the environment, so that torch need not be imported."""
    return int(os.environ.get("RANK", "0"))


def log_rank_zero(logger: logging.Logger, msg: str, level: int = logging.INFO) -> None:
    """Log ``msg`` on rank 0 only."""
    if get_rank() == 0:
        logger.log(level, msg, stacklevel=2)


@functools.cache
def log_once(logger: logging.Logger, msg: str, level: int = logging.INFO) -> None:
    """Log ``msg`` on rank 0, once per process."""
    log_rank_zero(logger, msg, level)
    _LOGGED_ONCE[msg] = None


def logged_once() -> list[str]:
    """Return the messages of :func:`log_once` so far, for example the kernels that attention uses."""
    return list(_LOGGED_ONCE)


def deprecated(msg: str = "") -> Callable[[T], T]:
    """Decorate a function or class as deprecated: every call warns with ``FutureWarning``.

    A class stays a class (``isinstance`` and subclassing work).
    """

    def decorate(obj: T) -> T:
        text = f"{obj.__name__} is deprecated and will be removed. {msg}".strip()
        if inspect.isclass(obj):
            init = obj.__init__

            @functools.wraps(init)
            def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
                warnings.warn(text, category=FutureWarning, stacklevel=2)
                init(self, *args, **kwargs)

            obj.__init__ = __init__
            return obj

        @functools.wraps(obj)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            warnings.warn(text, category=FutureWarning, stacklevel=2)
            return obj(*args, **kwargs)

        return wrapper  # type: ignore[return-value]

    return decorate


def deprecate_parameter(param_name: str, msg: str = "") -> Callable[[T], T]:
    """Decorate a function with a deprecated parameter: passing it (except ``None``) warns with ``FutureWarning``."""

    def decorate(obj: T) -> T:
        signature = inspect.signature(obj)

        @functools.wraps(obj)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if signature.bind_partial(*args, **kwargs).arguments.get(param_name) is not None:
                text = f"{param_name} is deprecated for {obj.__name__} and will be removed. {msg}".strip()
                warnings.warn(text, category=FutureWarning, stacklevel=2)
            return obj(*args, **kwargs)

        return wrapper  # type: ignore[return-value]

    return decorate
