"""Errors of generation."""

from torchtune.utils import UserError


class GenerationError(UserError, ValueError):
    """Invalid prompts or settings of generation."""
