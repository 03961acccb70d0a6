"""Devices, precision, memory, parallelism, optimizers and schedules; re-exports names of the packages above."""

from torchtune._lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
