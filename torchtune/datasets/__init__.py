"""Datasets for fine-tuning: named Hub datasets, local files, packing, mixtures and streams."""

from torchtune._lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
