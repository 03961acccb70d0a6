"""Qwen 3.5 with its vision tower: that of Qwen 3-VL, without DeepStack; dense, or with experts."""

from torchtune.models._build_vision import image_text_family
from torchtune.models.qwen3_5._model_builders import FORMAT
from torchtune.models.qwen3_5._model_builders import SPEC as TEXT
from torchtune.models.qwen3_5_moe._model_builders import FORMAT as MOE_FORMAT
from torchtune.models.qwen3_5_moe._model_builders import SPEC as MOE_TEXT
from torchtune.models.qwen3_vl._processor import QwenImages
from torchtune.models.qwen3_vl._tower import qwen_format, tower_names

_DENSE, _MOE = "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"
_QWEN3_5 = {
    "deep_layers": [],
    "tokens": (("image_token_id", 248_056), ("video_token_id", 248_057)),
    "sections": (11, 11, 10),
}
_FORMATS = (
    qwen_format(_DENSE, "qwen3_5", FORMAT, **_QWEN3_5),
    qwen_format(_MOE, "qwen3_5_moe", MOE_FORMAT, **_QWEN3_5),
)
# Both tables include the experts, which dense models lack.
_NAMES = {
    kind: MOE_TEXT.weight_map(kind).prefixed({"model.": "model.language_model."}, "decoder.").extended(tower_names())
    for kind in ("hf", "hf_fused")
}
SPEC = image_text_family("qwen3_5_vl", _FORMATS, _NAMES["hf"], QwenImages, TEXT, _NAMES)
