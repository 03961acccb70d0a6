"""Supervision of a run: watchdog, step synchronization, skipped steps, progress, throughput, profiler."""

from torchtune._lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
