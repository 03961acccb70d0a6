"""Llama 4 with its vision tower: text and images."""

from torchtune._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, {"SPEC": "_model_builders"})
