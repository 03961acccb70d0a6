"""Gemma 4 without encoders (12B): text and images."""

from torchtune._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, {"SPEC": "_model_builders"})
