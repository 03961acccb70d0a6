"""Errors of evaluations."""

from torchtune.utils import UserError


class EvaluationError(UserError):
    """An evaluation that is impossible with its arguments."""
