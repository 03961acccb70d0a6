"""Qwen 3.5 and 3.6, dense and with experts: text and images.

The tower is that of Qwen 3-VL without DeepStack.
"""

from torchtune.models._build_vision import image_text_family
from torchtune.models._weight_map import WeightMap
from torchtune.models.qwen3_5 import FORMAT
from torchtune.models.qwen3_5 import SPEC as TEXT
from torchtune.models.qwen3_5_moe import FORMAT as MOE_FORMAT
from torchtune.models.qwen3_5_moe import SPEC as MOE_TEXT
from torchtune.models.qwen3_vl import QwenImageProcessor, qwen_format, tower_names

_QWEN3_5 = {
    "deep_layers": [],
    "tokens": {"image_token_id": 248_056, "video_token_id": 248_057},
    "mrope_sections": (11, 11, 10),
}
_FORMATS = (
    qwen_format("Qwen3_5ForConditionalGeneration", "qwen3_5", FORMAT, **_QWEN3_5),
    qwen_format("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", MOE_FORMAT, **_QWEN3_5),
)


def _names(kind: str) -> WeightMap:
    """Make the weight map of a text decoder with its tower; it has the experts, which dense models lack."""
    text_names = MOE_TEXT.weight_map(kind).prefixed({"model.": "model.language_model."}, "decoder.")
    return text_names.extended(tower_names())


_NAMES = {"hf": _names("hf"), "hf_fused": _names("hf_fused")}
SPEC = image_text_family("qwen3_5_vl", _FORMATS, _NAMES["hf"], QwenImageProcessor, TEXT, _NAMES)

__all__ = ["SPEC"]
