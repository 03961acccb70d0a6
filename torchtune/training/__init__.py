"""Devices, precision, memory, parallelism, optimizers and schedules.

Names of the packages above are here for recipes of earlier releases.
"""

from torchtune._lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
