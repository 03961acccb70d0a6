"""Older import path of :class:`FrozenNF4Linear`."""

from torchtune.modules.low_precision._layers import FrozenNF4Linear

__all__ = ["FrozenNF4Linear"]
