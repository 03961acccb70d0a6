"""Optimizers: setup for a model, low precision, step in the backward pass, gradient norms."""

from torchtune._lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
