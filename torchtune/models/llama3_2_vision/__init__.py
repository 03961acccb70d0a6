"""Llama 3.2 Vision: text and images."""

from torchtune._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    dict.fromkeys(("Llama3VisionTransform", "llama3_2_vision_transform"), "_transform"),
)
