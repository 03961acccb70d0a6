"""Former address of :mod:`torchtune.checkpoints`."""

from torchtune._lazy import redirect

__getattr__, __dir__, __all__ = redirect(__name__, "torchtune.checkpoints")
