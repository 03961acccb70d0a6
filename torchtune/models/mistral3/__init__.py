"""Mistral 3 and Ministral 3 with Pixtral's vision tower, and Pixtral 12B: text and images."""

from torchtune._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, {"SPEC": "_model_builders"})
