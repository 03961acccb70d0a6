"""Qwen 2.5-VL: Qwen 2.5 with a tower whose attention is in windows."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torchtune.models._build_vision import image_text_family
from torchtune.models._hf_config import QWEN2
from torchtune.models._hf_fields import Fields
from torchtune.models._hf_vision import ImageTextFormat, read_layers, read_whole
from torchtune.models._vision_description import VisionDescription
from torchtune.models._vision_names import FlatPatches, gated_names, image_text_names, renamed_modules, rms_norms
from torchtune.models._weight_names import HF_HALF
from torchtune.models._weight_rows import Row
from torchtune.models.qwen3_vl._processor import QwenImages
from torchtune.models.qwen3_vl._tower import TOWER_SIZES, fused_qkv

_ARCHITECTURE = "Qwen2_5_VLForConditionalGeneration"


def _without_mrope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace the old RoPE type "mrope" by "default"; both have sections."""
    rope = config.get("rope_scaling")
    if not isinstance(rope, Mapping) or "mrope" not in (rope.get("type"), rope.get("rope_type")):
        return config
    return {**config, "rope_scaling": {**rope, "type": "default", "rope_type": "default"}}


def _read(fields: Fields, values: dict[str, Any], whole: Fields) -> dict[str, Any]:
    window = read_whole(fields, "window_size", 112)
    return {
        "window": window // values["patch_size"] // values["merge"],
        "full_layers": read_layers(fields, "fullatt_block_indexes", [7, 15, 23, 31]),
        "projector_dim": values["embed_dim"] * values["merge"] ** 2,
    }


def _write(v: VisionDescription) -> dict[str, Any]:
    return {"window_size": v.window * v.patch_size * v.merge, "fullatt_block_indexes": list(v.full_layers)}


_DEFAULTS = {"depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "patch_size": 14}
_TEXT = replace(
    QWEN2,
    architecture=_ARCHITECTURE,
    model_type="qwen2_5_vl_text",
    ropes=("sections",),
    prepare=_without_mrope,
    defaults=(
        ("num_key_value_heads", 8),
        ("max_position_embeddings", 32_768),
        ("sliding_window", 4096),
        ("max_window_layers", 80),
        ("rms_norm_eps", 1e-5),
        ("rope_theta", 1_000_000.0),
    ),
)
_FORMAT = ImageTextFormat(
    _ARCHITECTURE,
    "qwen2_5_vl",
    (_TEXT,),
    vision_type="qwen2_5_vl_vision",
    own=tuple((theirs, ours, _DEFAULTS.get(theirs, default)) for theirs, ours, default in TOWER_SIZES),
    tokens=(("image_token_id", 151_655), ("video_token_id", 151_656)),
    fixed={
        "patch_bias": False,
        "mlp_gated": True,
        "norm": "rms",
        "rope": "axial",
        "merge_norm": "rms",
        "merge_norm_eps": 1e-6,
    },
    unused=("tokens_per_second",),  # the image processor reads it
    activation=("hidden_act", "silu"),
    read_vision=_read,
    write_vision=_write,
    sections=(16, 24, 24),
    interleaved=False,
)


def _tower_names(start: str) -> list[Row]:
    layer, ours = f"{start}blocks.{{block}}.", "encoder.layers.{block}."
    merger = [("mlp.w1", "mlp.0"), ("mlp.w2", "mlp.2")]
    return [
        Row(f"{start}patch_embed.proj.weight", "encoder.patch_embed.weight", FlatPatches()),
        *fused_qkv(layer, ours),
        *renamed_modules(layer, ours, [("attn.output_proj", "attn.proj"), *gated_names()]),
        *rms_norms(layer, ours, [("sa_norm", "norm1"), ("mlp_norm", "norm2")]),
        *rms_norms(f"{start}merger.", "encoder.projector.", [("norm", "ln_q")]),
        *renamed_modules(f"{start}merger.", "encoder.projector.", merger),
    ]


_NAMES = image_text_names(HF_HALF, {}, _tower_names("visual."))
# transformers can save tensors under its module names.
_NESTED = image_text_names(HF_HALF, {"model.": "model.language_model."}, _tower_names("model.visual."))
_MODULES = (("model.", "model.language_model."), ("visual.", "model.visual."))
SPEC = image_text_family(
    "qwen2_5_vl", _FORMAT, {"hf": replace(_NAMES, modules=_MODULES), "hf_modules": _NESTED}, QwenImages
)
