"""The library's logger, the log files of the processes of a run, and deprecation notices.

Each process of a run writes its own log file, and the terminal shows rank 0.
"""

import faulthandler
import functools
import inspect
import logging
import os
import platform
import sys
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T", bound=Callable[..., Any])

_SCREEN_FORMAT = "%(levelname)s:%(name)s:%(message)s"
_FILE_FORMAT = "%(asctime)s %(levelname)s %(message)s"
# Messages of log_once, in order.
_LOGGED_ONCE: dict[str, None] = {}
# Folder of log files in a run's output folder.
_LOG_DIR = "logs"
# Printed once per machine, for any number of ranks.
LOST_RANK = "another rank is lost"
# Environment variable with the process id of `tune run`, for the workers started by torchrun.
AGENT_VARIABLE = "TORCHTUNE_AGENT_PID"
# Environment variable with the number of machines of `tune run`, or a range.
MACHINES_VARIABLE = "TORCHTUNE_NNODES"
# Environment variable with the seconds between the signal that stops a run and its kill, the option --grace.
GRACE_VARIABLE = "TORCHTUNE_GRACE"
# Start of the names of empty files that mark an error as printed on this machine.
_MARKER_PREFIX = "said_"


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
        handler.setFormatter(logging.Formatter(_SCREEN_FORMAT))
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
    bars = []
    if "tqdm" in sys.modules:  # without it, there is no bar
        bars = _bars_on(stream, sys.modules["tqdm"].tqdm)
    for bar in bars:
        bar.clear(nolock=True)
    yield
    # Without tqdm's lock, which forked processes share: one that is killed while it holds the lock would stop the log.
    for bar in bars:
        bar.refresh(nolock=True)


def _bars_on(stream: Any, tqdm: type) -> list[Any]:
    """Return the progress bars that show where ``stream`` does."""
    try:
        bars = list(tqdm._instances)
    except RuntimeError:  # another thread makes a bar at this moment
        return []
    streams = (stream,)
    if stream in (sys.stdout, sys.stderr):  # which usually show on the same screen
        streams = (sys.stdout, sys.stderr)
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


class LogFile(logging.FileHandler):
    """Log handler that appends to a file; if the file cannot be written, it warns once.

    The file is created with the first record. Crashes in C code write their stack traces to it, too.

    Args:
        path: path of the file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, delay=True, encoding="utf-8", errors="backslashreplace")
        self.path = path
        self._has_warned = False
        self._handles_crashes = False
        self.setFormatter(logging.Formatter(_FILE_FORMAT))

    @property
    def descriptor(self) -> int | None:
        """File descriptor, or ``None`` before the first record."""
        return None if self.stream is None else self.stream.fileno()

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        try:
            if self.stream is None:
                self._start()
        except OSError:
            self.handleError(record)
        else:
            super().emit(record)

    def _start(self) -> None:
        """Create the file, with a first line on this process, and write crashes to it, too."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.stream = self._open()
        self._handles_crashes = not faulthandler.is_enabled()
        if self._handles_crashes:
            faulthandler.enable(self.descriptor)
        size = os.environ.get("WORLD_SIZE", "1")
        text = f"Rank {get_rank()} of {size} starts: process {os.getpid()} on {platform.node()}."
        super().emit(logging.LogRecord("torchtune", logging.INFO, "", 0, text, None, None))

    def handleError(self, record: logging.LogRecord) -> None:
        """Warn about a file that cannot be written."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._has_warned:
            self._has_warned = True
            get_logger().warning(f"{self.path} cannot be written ({error.strerror}): the run goes on without it.")

    def close(self) -> None:
        """Close the file."""
        if self._handles_crashes:
            faulthandler.disable()
            self._handles_crashes = False
        with suppress(OSError):  # a full disk
            super().close()


# The file of get_run_logger, and the last error that note_in_run_log has written to it.
_run_log: LogFile | None = None
_last_noted: str | None = None
# The functions that were installed before.
_previous_showwarning: Any = None
_previous_excepthook: Any = None


def get_run_logger(output_dir: str | Path, level: str = "INFO") -> logging.Logger:
    """Return the library's logger, with a file ``<output_dir>/logs/rank_<r>.log`` for this process.

    The file receives messages of ``level``, Python's warnings, and the error that ends the process, with timestamps;
    a resumed run appends to it. The terminal shows the same messages on rank 0, and only errors on other ranks. The
    rank is torchrun's, 0 without torchrun. A second call closes the previous file.

    Args:
        output_dir: output folder of the run. Nothing is created there before the first record.
        level: ``"DEBUG"``, ``"INFO"`` …
    """
    global _run_log, _previous_showwarning, _previous_excepthook
    logger = get_logger(level)
    close_run_logger()  # also restores the functions that an earlier call has replaced below
    rank = get_rank()
    if rank != 0:
        if not logger.handlers:  # the root logger's handlers show the level chosen by the application
            logger.addHandler(logging.StreamHandler())
            logger.handlers[-1].setFormatter(logging.Formatter(_SCREEN_FORMAT))
        logger.propagate = False
        for handler in logger.handlers:  # not yet the file's, which receives all messages
            handler.setLevel(logging.ERROR)
    _run_log = LogFile(Path(output_dir) / _LOG_DIR / f"rank_{rank}.log")
    logger.addHandler(_run_log)
    _previous_showwarning = warnings.showwarning
    warnings.showwarning = _log_warning
    _previous_excepthook = sys.excepthook
    sys.excepthook = _log_exception
    return logger


def close_run_logger() -> None:
    """Close the file of :func:`get_run_logger`, if any."""
    global _run_log, _last_noted
    if _run_log is None:
        return
    _last_noted = None
    get_logger().removeHandler(_run_log)
    _run_log.close()
    _run_log = None
    if warnings.showwarning is _log_warning:
        warnings.showwarning = _previous_showwarning
    if sys.excepthook is _log_exception:
        sys.excepthook = _previous_excepthook


def run_log_path(rank: int) -> Path | None:
    """Return the path of a rank's log file; ``None`` without :func:`get_run_logger`."""
    return None if _run_log is None else _run_log.path.with_name(f"rank_{rank}.log")


def dump_stacks(title: str) -> None:
    """Write the stack traces of all threads to the log file, or to stderr without a log file."""
    if _run_log is not None:
        _run_log.handle(_error_record(title))
    faulthandler.dump_traceback(_stacks_file())


def dump_stacks_after(seconds: float | None) -> None:
    """Dump stack traces unless this is called again within ``seconds``; ``None`` cancels it.

    The dump works even if no Python code can run.
    """
    if seconds is None:
        faulthandler.cancel_dump_traceback_later()
    else:
        faulthandler.dump_traceback_later(seconds, file=_stacks_file())


def _stacks_file() -> Any:
    """Return the descriptor of the log file, or stderr without one; faulthandler takes both."""
    if _run_log is None or _run_log.descriptor is None:
        return sys.__stderr__
    return _run_log.descriptor


def note_in_run_log(text: str) -> None:
    """Write an error only to the log file, because the terminal shows it already.

    Do nothing without a log file, if the run's folder does not exist, or if ``text`` is also the last error noted.
    """
    global _last_noted
    if _run_log is None or text == _last_noted:
        return
    has_folder = _run_log.descriptor is not None or _run_log.path.parents[1].is_dir()
    if has_folder:
        _last_noted = text
        _run_log.handle(_error_record(text))


def is_first_to_print(text: str, *, shared: bool = False) -> bool:
    """Return True for the first of this machine's torchrun workers that calls this function with ``text``.

    The workers share torchrun's folder of error files. Without torchrun, the result is True, or if ``shared`` (all
    ranks call the function), True on local rank 0.
    """
    folder = _error_folder()
    if folder is None:
        return not shared or os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        (folder / f"{_MARKER_PREFIX}{zlib.crc32(text.encode()):08x}").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def was_error_printed() -> bool:
    """Return whether a torchrun worker on this machine has already printed its error."""
    folder = _error_folder()
    return folder is not None and any(folder.glob(f"{_MARKER_PREFIX}*"))


def _error_folder() -> Path | None:
    """Return the folder that torchrun's workers of this machine share, two levels above a worker's error file."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file is None:
        return None
    return Path(error_file).parents[1]


def _error_record(text: str) -> logging.LogRecord:
    return logging.LogRecord("torchtune", logging.ERROR, "", 0, text, None, None)


def _log_warning(
    message: Any, category: type[Warning], filename: str, lineno: int, file: Any = None, line: str | None = None
) -> None:
    """Write a warning to the log file, and show it on rank 0; replaces ``warnings.showwarning``."""
    if file is None and _run_log is not None:
        text = warnings.formatwarning(message, category, filename, lineno, line).rstrip()
        _run_log.handle(logging.LogRecord("torchtune", logging.WARNING, filename, lineno, text, None, None))
    if file is not None or get_rank() == 0:
        _previous_showwarning(message, category, filename, lineno, file, line)


def _log_exception(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Write the error that ends the process to the log file, with its traceback; replaces ``sys.excepthook``."""
    note_in_run_log("".join(traceback.format_exception(kind, error, trace)).rstrip())
    _previous_excepthook(kind, error, trace)


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
