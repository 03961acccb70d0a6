"""Llama 4: mixtures of experts with attention in chunks, and a vision tower."""

from torchtune._lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
