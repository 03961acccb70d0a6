"""Errors of evaluations."""

from torchtune.utils import UserError


class EvaluationError(UserError):
    """An evaluation cannot be done as it was asked for."""
