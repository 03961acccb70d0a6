"""Former address of :mod:`torchtune.compat`."""

from torchtune._lazy import redirect

__getattr__, __dir__, __all__ = redirect(__name__, "torchtune.compat")
