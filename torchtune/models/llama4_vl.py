"""Llama 4 with its vision tower: text and images.

The tower sees tiles of an image.
"""

from typing import Any

from torchtune.models._build_vision import image_text_family
from torchtune.models._description import VisionDescription
from torchtune.models._hf_fields import Fields
from torchtune.models._hf_vision import ImageTextFormat
from torchtune.models._weight_map import Identity, Row, WeightMap, rename_prefix
from torchtune.models._weight_names import attention_names, module_rows
from torchtune.models._weight_ops import FlatPatches
from torchtune.models.llama4 import FORMAT, Llama4ImageProcessor
from torchtune.models.llama4 import SPEC as TEXT

_MERGE = 2


def _read(fields: Fields, values: dict[str, Any], outer_fields: Fields) -> dict[str, Any]:
    fields.require(pixel_shuffle_ratio=1 / _MERGE)
    if values["intermediate_dim"] != values["embed_dim"] * _MERGE**2:  # which is also the projector's input
        raise fields.refusal("intermediate_size", values["intermediate_dim"])
    return {"positions_side": fields.typed("image_size", 448) // values["patch_size"]}


def _write(v: VisionDescription) -> dict[str, Any]:
    return {"image_size": v.positions_side * v.patch_size, "pixel_shuffle_ratio": 1 / _MERGE}


_FORMAT = ImageTextFormat(
    "Llama4ForConditionalGeneration",
    "llama4",
    FORMAT,
    vision_type="llama4_vision_model",
    tower_fields=(
        *ImageTextFormat.sizes(embed_dim=768, intermediate_dim=5632, num_layers=34, num_heads=16, patch_size=14),
        ("num_channels", "num_channels", 3),
        ("vision_output_dim", "projector_dim", 7680),
    ),
    tokens={"image_token_index": 200_092},
    fixed={
        "patch_bias": False,
        "first_norm": True,
        "last_norm": True,
        "projector_first": True,
        "projector_bias": False,
        "activation": "gelu",
        "norm_eps": 1e-5,
        "positions": "classed",
        "rope": "neighbors",
        "merge": _MERGE,
    },
    derived={"projector_input_dim": "projector_dim", "projector_output_dim": "projector_dim"},
    tower_unused=("hidden_act", "norm_eps", "vision_feature_select_strategy"),  # transformers does not use them
    read_vision=_read,
    write_vision=_write,
    outer_unused=("boi_token_index", "eoi_token_index", "image_token_id"),
)
_LAYER = (
    ("sa_norm", "input_layernorm"),
    *attention_names(),
    ("mlp_norm", "post_attention_layernorm"),
    ("mlp.w1", "mlp.fc1"),
    ("mlp.w2", "mlp.fc2"),
)
_TOWER = "vision_model."
_PROJECTOR = (("reduce.0", "mlp.fc1"), ("mlp.w1", "mlp.fc2"))
_ROWS = [
    Row(f"{_TOWER}patch_embedding.linear.weight", "encoder.patch_embed.weight"),
    Row(f"{_TOWER}class_embedding", "encoder.positions.class_token"),
    Row(f"{_TOWER}positional_embedding_vlm", "encoder.positions.table.weight"),
    *module_rows(_TOWER, "encoder.", [("first_norm", "layernorm_pre"), ("norm", "layernorm_post")]),
    *module_rows(f"{_TOWER}model.layers.{{block}}.", "encoder.layers.{block}.", _LAYER),
    *module_rows(f"{_TOWER}vision_adapter.", "encoder.projector.", _PROJECTOR, ["weight"]),
    Row("multi_modal_projector.linear_1.weight", "encoder.projector.mlp.w2.weight"),
]
_HF = TEXT.weight_map().prefixed(TEXT.module_prefixes, "decoder.").extended(_ROWS)
# Our names -> those of earlier releases.
_CLIP = "encoders.vision.clip."
_HEAD = "encoders.vision.projection.output."
_EARLIER = {
    "encoder.layers.": f"{_CLIP}layers.",
    "encoder.patch_embed.": f"{_CLIP}conv.",
    "encoder.positions.table.weight": f"{_CLIP}token_pos_embedding.positional_embedding",
    "encoder.positions.class_token": f"{_CLIP}cls_token_embedding.weight",
    "encoder.first_norm.": f"{_CLIP}ln_pre.",
    "encoder.norm.": f"{_CLIP}ln_post.",
    "encoder.projector.reduce.0.": f"{_HEAD}0.",
    "encoder.projector.mlp.w1.": f"{_HEAD}2.",
    "encoder.projector.mlp.w2.": f"{_HEAD}4.",
}


def _earlier_rows() -> list[Row]:
    """Make the rows of files of earlier releases, from which only their names and the shape of patches differ."""
    rows = []
    for row in _HF.rows:
        for name in row.tune_templates:
            op = FlatPatches() if ".patch_embed." in name else Identity()
            rows.append(Row(rename_prefix(name, _EARLIER), name, op, row.when))
    return rows


_EARLIER_NAMES = {"earlier": WeightMap(tuple(_earlier_rows()))}
SPEC = image_text_family("llama4_vl", [_FORMAT], _HF, Llama4ImageProcessor, TEXT, _EARLIER_NAMES)

__all__ = ["SPEC"]
