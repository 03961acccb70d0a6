"""Transforms of samples; tokenizers are in ``torchtune.tokenizers``."""

from torchtune._lazy import attach
from torchtune.data import Transform

__getattr__, __dir__, __all__ = attach(__name__, {"VisionCrossAttentionMask": "_transforms"})
__all__ += ["Transform"]
