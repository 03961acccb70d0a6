"""Transforms of samples; tokenizers are in ``torchtune.tokenizers``."""

from torchtune._lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
