"""Errors of checkpoints."""

from torchtune.utils import UserError


class CheckpointError(UserError, ValueError):
    """A checkpoint cannot be read, does not fit the model, or cannot be written."""
