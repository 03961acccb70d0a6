"""The error that a user can mend."""


class UserError(Exception):
    """A mistake in what the user gave: configuration, data, checkpoint or machine.

    The message is one sentence that says what is wrong, where, and what to do. The command line prints it
    without a traceback and exits with code 2. Rooms derive their own (``CheckpointError``, ``DataError`` …).
    """


class LostRankError(RuntimeError):
    """Another rank of the run is gone or failed, so that this one cannot go on.

    Args:
        message: one sentence that names the rank and says what to do.
        exit_code: of this process; 75 if the same command can go on, 2 after a user error there, else 1.

    Attributes:
        is_told: whether the lost rank has said it on the screen of this machine.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code, self.is_told = exit_code, False
