"""Qwen 3-VL: Qwen 3 with DeepStack and positions in time, rows and columns; dense, or with experts."""

from dataclasses import replace
from typing import Any

from torchtune.models._build_vision import image_text_family
from torchtune.models._family import (
    HF_HALF,
    QWEN3,
    Description,
    Fields,
    experts,
    layers_without_experts,
    with_fused_experts,
)
from torchtune.models.qwen3_vl._processor import QwenImages
from torchtune.models.qwen3_vl._tower import qwen_format, tower_names

_TOKENS = (("image_token_id", 151_655), ("video_token_id", 151_656))
_DENSE = replace(
    QWEN3,
    architecture="Qwen3VLForConditionalGeneration",
    model_type="qwen3_vl_text",
    windows="none",
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
)


def _read_experts(fields: Fields) -> dict[str, Any]:
    number = fields.take("num_local_experts", 60)  # the name in transformers 5
    fields.take("norm_topk_prob", None)  # transformers always normalizes
    return {
        "num_experts": fields.take("num_experts", number),
        "expertless_layers": layers_without_experts(fields),
        "router_normalize": True,
    }


def _write_experts(d: Description) -> dict[str, Any]:
    return {"num_experts": d.num_experts, "mlp_only_layers": list(d.expertless_layers), "decoder_sparse_step": 1}


_MOE = replace(
    _DENSE,
    architecture="Qwen3VLMoeForConditionalGeneration",
    model_type="qwen3_vl_moe_text",
    own=(
        ("num_experts_per_tok", "experts_per_token", 4),
        ("moe_intermediate_size", "expert_dim", 1408),
        ("router_aux_loss_coef", "router_balance", 0.001),
    ),
    read_more=_read_experts,
    write_more=_write_experts,
    defaults=(("num_key_value_heads", 16), ("max_position_embeddings", 128_000), ("rope_theta", 500_000.0)),
)
_QWEN3_VL = {"deep_layers": [8, 16, 24], "tokens": _TOKENS, "sections": (24, 20, 20)}
_FORMATS = (
    qwen_format(_DENSE.architecture, "qwen3_vl", _DENSE, **_QWEN3_VL),
    qwen_format(_MOE.architecture, "qwen3_vl_moe", _MOE, **_QWEN3_VL),
)
_EXPERTS = experts(HF_HALF, "mlp", "gate_proj", "up_proj", "down_proj")
_TEXT = with_fused_experts(_EXPERTS, "mlp", both=True).prefixed({"model.": "model.language_model."}, "decoder.")
SPEC = image_text_family("qwen3_vl", _FORMATS, _TEXT.extended(tower_names()), QwenImages)
