"""Idefics 3: SmolVLM 2 with another ``config.json``."""

from dataclasses import replace

from torchtune.models._build_vision import image_text_family
from torchtune.models.smolvlm._model_builders import FORMAT, NAMES
from torchtune.models.smolvlm._processor import TiledImages

_FORMAT = replace(
    FORMAT,
    architecture="Idefics3ForConditionalGeneration",
    model_type="idefics3",
    vision_type="idefics3_vision",
)
SPEC = image_text_family("idefics3", [_FORMAT], NAMES, TiledImages)
