"""Memory, time and communication of a run before it starts: a simulated cluster, and checks of settings and data."""

from torchtune._lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
