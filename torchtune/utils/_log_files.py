"""What every process of a run says, kept in files; the screen is for the first one."""

import faulthandler
import logging
import os
import platform
import sys
import traceback
import warnings
import zlib
from pathlib import Path
from typing import Any

from torchtune.utils._appended import AppendedFile
from torchtune.utils._logging import SCREEN_FORMAT, get_logger, get_rank

LOG_DIR = "logs"
# Said once on a machine, whatever its ranks know of it.
LOST = "another rank is lost"
# Environment variable with the process id of `tune run`, for the workers that torchrun starts in it.
AGENT_VARIABLE = "TORCHTUNE_AGENT_PID"
# Environment variable with the number of machines that `tune run` was started for, or its range.
MACHINES_VARIABLE = "TORCHTUNE_NNODES"
_SAID = "said_"
_FORMAT = "%(asctime)s %(levelname)s %(message)s"


class LogFile(logging.Handler):
    """Appends every record to a file, which is made with the first one; that it cannot be is said once, as a warning.

    A record is one write to the end of the file: nothing waits in a buffer when the process is killed, and lines of
    several processes do not mix. A process that crashes inside of C leaves its stacks there too. A file that somebody
    removes is made again.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._file: AppendedFile | None = None
        self._warned = False
        self._torn = False
        self._for_crashes = False
        self.setFormatter(logging.Formatter(_FORMAT))

    @property
    def descriptor(self) -> int | None:
        """Of the file, once there is one."""
        return None if self._file is None else self._file.descriptor

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        try:
            if self._file is None:
                self._open(record)
            self._write(self.format(record))
        except OSError as error:
            if not self._warned:
                self._warned = True
                get_logger().warning(f"{self.path} cannot be written ({error.strerror}): the run goes on without it.")

    def _open(self, record: logging.LogRecord) -> None:
        self._file = AppendedFile(self.path)
        self._for_crashes = not faulthandler.is_enabled()
        if self._for_crashes:
            faulthandler.enable(self.descriptor)
        size = os.environ.get("WORLD_SIZE", "1")
        text = f"Rank {get_rank()} of {size} starts: process {os.getpid()} on {platform.node()}."
        first = logging.LogRecord(record.name, logging.INFO, "", 0, text, None, None)
        first.created, first.msecs = record.created, record.msecs
        self._write(self.format(first))

    def _write(self, line: str) -> None:
        data = (("\n" if self._torn else "") + line + "\n").encode(errors="backslashreplace")
        written = self._file.write(data)  # a full disk may take a part, or none
        self._torn = written < len(data)

    def close(self) -> None:
        """Let go of the file."""
        if self._for_crashes:
            faulthandler.disable()
            self._for_crashes = False
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                get_logger().warning(f"{self.path} is lost, it was removed and cannot be made again ({error}).")
        super().close()


_file: LogFile | None = None
_noted: str | None = None
# What showed them before.
_show_warning: Any = None
_show_exception: Any = None


def get_run_logger(output_dir: str | Path, level: str = "INFO") -> logging.Logger:
    """The library's logger for a run: all that this process says goes into ``<output_dir>/logs/rank_<r>.log``.

    The file takes messages of ``level``, Python's warnings, and the error that ends the process, each with its time; a
    run that resumes goes on in the same file. On the screen rank 0 shows the same, the others errors alone. The rank
    is torchrun's, 0 without it. Called again, the file of the earlier run is closed.

    Args:
        output_dir: of the run. Nothing is made there before there is something to say.
        level: ``"DEBUG"``, ``"INFO"`` …
    """
    global _file, _show_warning, _show_exception
    logger = get_logger(level)
    close_run_logger()
    rank = get_rank()
    if rank != 0:
        if not logger.handlers:  # handlers of the root show what the application wants
            logger.addHandler(logging.StreamHandler())
            logger.handlers[-1].setFormatter(logging.Formatter(SCREEN_FORMAT))
        logger.propagate = False
        for handler in logger.handlers:
            handler.setLevel(logging.ERROR)
    _file = LogFile(Path(output_dir) / LOG_DIR / f"rank_{rank}.log")
    logger.addHandler(_file)
    _show_warning, warnings.showwarning = warnings.showwarning, _warning_into_file
    _show_exception, sys.excepthook = sys.excepthook, _exception_into_file
    return logger


def close_run_logger() -> None:
    """Close the file of :func:`get_run_logger`; without one, do nothing."""
    global _file, _noted
    if _file is None:
        return
    _noted = None
    get_logger().removeHandler(_file)
    _file.close()
    _file = None
    if warnings.showwarning is _warning_into_file:
        warnings.showwarning = _show_warning
    if sys.excepthook is _exception_into_file:
        sys.excepthook = _show_exception


def run_log_path(rank: int) -> Path | None:
    """Where a rank of this run writes what it says; ``None`` without :func:`get_run_logger`."""
    return None if _file is None else _file.path.with_name(f"rank_{rank}.log")


def dump_stacks(title: str) -> None:
    """Write where every thread is into the file of :func:`get_run_logger`, or on the screen without it."""
    if _file is not None:
        _file.handle(_error(title))
    faulthandler.dump_traceback(_stacks_file())


def dump_stacks_after(seconds: float | None) -> None:
    """Do so if this is not called again in time, even where no Python code can run any more; ``None`` calls it off."""
    if seconds is None:
        faulthandler.cancel_dump_traceback_later()
    else:
        faulthandler.dump_traceback_later(seconds, file=_stacks_file())


def _stacks_file() -> Any:
    return sys.__stderr__ if _file is None or _file.descriptor is None else _file.descriptor


def note_in_run_log(text: str) -> None:
    """Write an error into the file of :func:`get_run_logger` alone: the screen has it already.

    Without a file, where not even the run's folder exists, or if it is what was last noted, do nothing.
    """
    global _noted
    if _file is not None and (_file.descriptor is not None or _file.path.parents[1].is_dir()) and text != _noted:
        _noted = text
        _file.handle(_error(text))


def first_to_say(text: str) -> bool:
    """Whether no other process that this machine's torchrun started has asked for the same text before.

    They ask in the folder where torchrun keeps a file for the error of each. Without torchrun, there is no other.
    """
    folder = _folder_of_errors()
    try:
        if folder is not None:
            (folder / f"{_SAID}{zlib.crc32(text.encode()):08x}").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def was_said() -> bool:
    """Whether a process that this machine's torchrun started has said why it ends."""
    folder = _folder_of_errors()
    return folder is not None and any(folder.glob(f"{_SAID}*"))


def _folder_of_errors() -> Path | None:
    own = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return None if own is None else Path(own).parents[1]


def _error(text: str) -> logging.LogRecord:
    return logging.LogRecord("torchtune", logging.ERROR, "", 0, text, None, None)


def _warning_into_file(
    message: Any, category: type[Warning], filename: str, lineno: int, file: Any = None, line: str | None = None
) -> None:
    if file is None and _file is not None:
        text = warnings.formatwarning(message, category, filename, lineno, line).rstrip()
        _file.handle(logging.LogRecord("torchtune", logging.WARNING, filename, lineno, text, None, None))
    if file is not None or get_rank() == 0:
        _show_warning(message, category, filename, lineno, file, line)


def _exception_into_file(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    note_in_run_log("".join(traceback.format_exception(kind, error, trace)).rstrip())
    _show_exception(kind, error, trace)
