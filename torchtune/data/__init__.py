"""Messages, prompt templates, label masks and collation: convert text to token rows and batches."""

from torchtune._lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
