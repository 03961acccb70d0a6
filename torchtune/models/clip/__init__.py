"""CLIP: the images of vision models."""

from torchtune._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, {"CLIPImageTransform": "_transform"})
