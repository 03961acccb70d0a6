"""Qwen 3.5 and 3.6, dense and with experts: text and images."""

from torchtune._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, {"SPEC": "_model_builders"})
