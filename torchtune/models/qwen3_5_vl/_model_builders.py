"""Qwen 3.5 with its vision tower: that of Qwen 3-VL, without DeepStack."""

from dataclasses import replace

from torchtune.models._build_vision import build_image_text
from torchtune.models._hf_vision import qwen_format
from torchtune.models._image_processors import QwenImages
from torchtune.models._vision_names import image_text_names, qwen_tower
from torchtune.models.qwen3_5._model_builders import FORMAT
from torchtune.models.qwen3_5._model_builders import SPEC as TEXT

_FORMAT = qwen_format(
    "Qwen3_5ForConditionalGeneration",
    "qwen3_5",
    FORMAT,
    deep_layers=[],
    tokens=(("image_token_id", 248_056), ("video_token_id", 248_057)),
    sections=(11, 11, 10),
)
SPEC = replace(
    TEXT,
    name="qwen3_5_vl",
    architectures=("Qwen3_5ForConditionalGeneration",),
    from_hf_config=_FORMAT.read,
    to_hf_config=_FORMAT.write,
    weight_maps={"hf": image_text_names(TEXT.weight_map(), {"model.": "model.language_model."}, qwen_tower())},
    builder=build_image_text,
    image_processor=QwenImages.from_config,
)
