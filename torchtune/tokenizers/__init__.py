"""Tokenizers for text and conversations; each imports its backend library only when it is used."""

from torchtune._lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
