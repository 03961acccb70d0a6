"""The error that a user can mend."""


class UserError(Exception):
    """A mistake in what the user gave: configuration, data, checkpoint or machine.

    The message is one sentence that says what is wrong, where, and what to do. The command line prints it
    without a traceback and exits with code 2. Rooms derive their own (``CheckpointError``, ``DataError`` …).
    """
