"""Qwen 3-VL, dense: Qwen 3 with DeepStack and positions in time, rows and columns."""

from torchtune.models._build_vision import build_image_text
from torchtune.models._hf_config import HFFormat
from torchtune.models._hf_vision import qwen_format
from torchtune.models._image_processors import QwenImages
from torchtune.models._spec import ModelSpec
from torchtune.models._vision_names import image_text_names, qwen_tower
from torchtune.models._weight_names import HF_HALF

_FORMAT = qwen_format(
    "Qwen3VLForConditionalGeneration",
    "qwen3_vl",
    HFFormat(
        "Qwen3VLForConditionalGeneration",
        "qwen3_vl_text",
        "half",
        biases="attention_bias",
        qk_norm="before_rope",
        ropes=("sections",),
        defaults=(
            ("num_key_value_heads", 32),
            ("head_dim", 128),
            ("max_position_embeddings", 128_000),
            ("rope_theta", 500_000.0),
            ("vocab_size", 151_936),
            ("hidden_size", 4096),
            ("intermediate_size", 22_016),
            ("num_hidden_layers", 32),
            ("num_attention_heads", 32),
        ),
    ),
    deep_layers=[8, 16, 24],
    tokens=(("image_token_id", 151_655), ("video_token_id", 151_656)),
    sections=(24, 20, 20),
)
SPEC = ModelSpec(
    name="qwen3_vl",
    architectures=("Qwen3VLForConditionalGeneration",),
    from_hf_config=_FORMAT.read,
    to_hf_config=_FORMAT.write,
    weight_maps={"hf": image_text_names(HF_HALF, {"model.": "model.language_model."}, qwen_tower())},
    builder=build_image_text,
    image_processor=QwenImages.from_config,
)
