"""Former address of :mod:`torchtune.tokenizers`."""

from torchtune._lazy import redirect

__getattr__, __dir__, __all__ = redirect(__name__, "torchtune.tokenizers")
