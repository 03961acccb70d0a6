"""Base classes of errors that are shown to the user without a traceback."""

from typing import ClassVar

# Exit code of a run that the same command resumes: EX_TEMPFAIL of sysexits.h, upon which schedulers can be set to
# requeue the job.
EXIT_REQUEUE = 75
# Exit code of a stalled rank; neither torch nor Python uses it.
HANG_EXIT_CODE = 76


class UserError(Exception):
    """Error in the user's input: configuration, data, checkpoint or machine.

    The message is one sentence on the error, its place and the remedy. The command line prints it without a
    traceback and exits with ``exit_code``. Packages derive their own classes (``CheckpointError``, ``DataError`` …).
    """

    exit_code: ClassVar[int] = 2
    raised_on_all: bool = False  # every rank raises the error, so it is printed once


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error, or its class name if the message is empty."""
    return str(error).strip().partition("\n")[0].rstrip(". ") or type(error).__name__


class LostRankError(RuntimeError):
    """Error of a rank that must stop because another rank is lost or has failed.

    Args:
        message: one sentence with the lost rank and the remedy.
        exit_code: exit code of this process: ``EXIT_REQUEUE`` if the same command can resume the run, 2 after a user
            error on the other rank, otherwise 1.

    Attributes:
        is_reported: whether the lost rank has already printed the error on this machine.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.is_reported = False
