"""Transforms of samples; tokenizers are in ``torchtune.modules.transforms.tokenizers``."""

from torchtune.data import Transform

__all__ = ["Transform"]
