"""Qwen 2.5-VL: text and images.

Qwen 2.5 with a tower that attends within windows in all but four layers (https://arxiv.org/abs/2502.13923).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torchtune.models._build_vision import image_text_family
from torchtune.models._description import VisionDescription
from torchtune.models._hf_config import QWEN2
from torchtune.models._hf_fields import Fields
from torchtune.models._hf_vision import ImageTextFormat
from torchtune.models._weight_map import Row
from torchtune.models._weight_names import HF_HALF, gated_names, module_rows
from torchtune.models._weight_ops import FlatPatches
from torchtune.models.qwen3_vl import TOWER_FIELDS, QwenImageProcessor, fused_qkv

_ARCHITECTURE = "Qwen2_5_VLForConditionalGeneration"


def _without_mrope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace the old RoPE type "mrope" by "default"; both have sections."""
    rope = config.get("rope_scaling")
    if not isinstance(rope, Mapping) or "mrope" not in (rope.get("type"), rope.get("rope_type")):
        return config
    return {**config, "rope_scaling": {**rope, "type": "default", "rope_type": "default"}}


def _read(fields: Fields, values: dict[str, Any], outer_fields: Fields) -> dict[str, Any]:
    window = fields.typed("window_size", 112)
    return {
        "window": window // values["patch_size"] // values["merge"],
        "full_layers": tuple(fields.list_of("fullatt_block_indexes", 32, int, [7, 15, 23, 31])),
        "projector_dim": values["embed_dim"] * values["merge"] ** 2,
    }


def _write(v: VisionDescription) -> dict[str, Any]:
    return {"window_size": v.window * v.patch_size * v.merge, "fullatt_block_indexes": list(v.full_layers)}


_DEFAULTS = {"depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "patch_size": 14, "hidden_act": "silu"}
_TEXT = replace(
    QWEN2,
    architecture=_ARCHITECTURE,
    model_type="qwen2_5_vl_text",
    ropes=("sections",),
    prepare=_without_mrope,
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 32_768,
        "sliding_window": 4096,
        "max_window_layers": 80,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
    },
)
_FORMAT = ImageTextFormat(
    _ARCHITECTURE,
    "qwen2_5_vl",
    _TEXT,
    vision_type="qwen2_5_vl_vision",
    tower_fields=tuple((name, field, _DEFAULTS.get(name, default)) for name, field, default in TOWER_FIELDS),
    tokens={"image_token_id": 151_655, "video_token_id": 151_656},
    fixed={
        "patch_bias": False,
        "mlp_gated": True,
        "norm": "rms",
        "rope": "axial",
        "merge_norm": "rms",
        "merge_norm_eps": 1e-6,
    },
    # The image processor reads the first. Published files have the others beside in_channels and patch_size.
    tower_unused=("tokens_per_second", "in_chans", "spatial_patch_size"),
    read_vision=_read,
    write_vision=_write,
    mrope_sections=(16, 24, 24),
    mrope_interleaved=False,
)


_HF_LAYER = "visual.blocks.{block}."
_TUNE_LAYER = "encoder.layers.{block}."
_MERGER = [("mlp.w1", "mlp.0"), ("mlp.w2", "mlp.2")]
_ROWS = [
    Row("visual.patch_embed.proj.weight", "encoder.patch_embed.weight", FlatPatches()),
    *fused_qkv(_HF_LAYER, _TUNE_LAYER),
    *module_rows(_HF_LAYER, _TUNE_LAYER, [("attn.output_proj", "attn.proj"), *gated_names()]),
    *module_rows(_HF_LAYER, _TUNE_LAYER, [("sa_norm", "norm1"), ("mlp_norm", "norm2")], ["scale"]),
    Row("visual.merger.ln_q.weight", "encoder.projector.norm.scale"),
    *module_rows("visual.merger.", "encoder.projector.", _MERGER),
]
_MODULES = (("model.", "model.language_model."), ("visual.", "model.visual."))
_NAMES = replace(HF_HALF.prefixed({}, "decoder.").extended(_ROWS), modules=_MODULES)
SPEC = image_text_family("qwen2_5_vl", [_FORMAT], _NAMES, QwenImageProcessor)

__all__ = ["SPEC"]
