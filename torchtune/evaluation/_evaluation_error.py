"""Errors of evaluations."""

from torchtune.utils import UserError


class EvaluationError(UserError):
    """Invalid arguments or data of an evaluation."""
