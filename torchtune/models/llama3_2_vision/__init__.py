"""Llama 3.2 Vision: text and images."""

from torchtune._lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
