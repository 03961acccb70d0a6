"""Quantizers, under the path that configs name; they stand in :mod:`torchtune.modules.low_precision.quantizers`."""

from torchtune._lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
