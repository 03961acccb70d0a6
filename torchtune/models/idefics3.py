"""Idefics 3: text and images.

SmolVLM 2's architecture at another size, with another ``config.json`` (https://arxiv.org/abs/2408.12637).
"""

from dataclasses import replace

from torchtune.models._build_vision import image_text_family
from torchtune.models.smolvlm import FORMAT, NAMES, SmolVLMImageProcessor

_FORMAT = replace(
    FORMAT,
    architecture="Idefics3ForConditionalGeneration",
    model_type="idefics3",
    vision_type="idefics3_vision",
)
SPEC = image_text_family("idefics3", [_FORMAT], NAMES, SmolVLMImageProcessor)

__all__ = ["SPEC"]
