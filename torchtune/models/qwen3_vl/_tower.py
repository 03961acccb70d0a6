"""Tower of Qwen 3-VL and Qwen 3.5: its ``config.json`` and weight names."""

from functools import partial
from typing import Any

from torchtune.models._hf_config import HFFormat
from torchtune.models._hf_fields import Fields
from torchtune.models._hf_vision import ImageTextFormat, read_layers, read_whole
from torchtune.models._vision_description import VisionDescription
from torchtune.models._vision_names import FlatPatches, renamed_modules
from torchtune.models._weight_ops import Split
from torchtune.models._weight_rows import Row

# Sizes of a tower: their name, our name, default.
TOWER_SIZES = (
    ("depth", "num_layers", 27),
    ("hidden_size", "embed_dim", 1152),
    ("intermediate_size", "intermediate_dim", 4304),
    ("num_heads", "num_heads", 16),
    ("in_channels", "num_channels", 3),
    ("patch_size", "patch_size", 16),
    ("temporal_patch_size", "frames_per_patch", 2),
    ("spatial_merge_size", "merge", 2),
    ("out_hidden_size", "output_dim", 3584),
)


def _read(fields: Fields, values: dict[str, Any], whole: Fields, deep_layers: list[int]) -> dict[str, Any]:
    table = read_whole(fields, "num_position_embeddings", 2304)
    side = round(table**0.5)
    if side * side != table:
        raise fields.refusal("num_position_embeddings", table)
    return {
        "positions_side": side,
        "projector_dim": values["embed_dim"] * values["merge"] ** 2,
        "deep_layers": read_layers(fields, "deepstack_visual_indexes", deep_layers),
    }


def _write(v: VisionDescription) -> dict[str, Any]:
    return {
        "num_position_embeddings": v.positions_side**2,
        "deepstack_visual_indexes": list(v.deep_layers),
    }


def qwen_format(
    architecture: str, model_type: str, text: HFFormat, deep_layers: list[int], **more: Any
) -> ImageTextFormat:
    """Make the format of Qwen 3-VL and Qwen 3.5.

    Args:
        architecture: as in :class:`ImageTextFormat`; likewise ``model_type``, ``text`` and ``more``.
        deep_layers: default of ``deepstack_visual_indexes``.
    """
    return ImageTextFormat(
        architecture,
        model_type,
        (text,),
        vision_type=f"{model_type}_vision",
        own=TOWER_SIZES,
        fixed={"positions": "interpolated", "rope": "axial", "merge_norm": "layer", "merge_norm_eps": 1e-6},
        activation=("hidden_act", "gelu_pytorch_tanh"),
        read_vision=partial(_read, deep_layers=deep_layers),
        write_vision=_write,
        **more,
    )


# Names of modules: ours, theirs.
_LAYER = (
    ("sa_norm", "norm1"),
    ("mlp_norm", "norm2"),
    ("attn.output_proj", "attn.proj"),
    ("mlp.w1", "mlp.linear_fc1"),
    ("mlp.w2", "mlp.linear_fc2"),
)
_MERGER = (("mlp.w1", "linear_fc1"), ("mlp.w2", "linear_fc2"))


def fused_qkv(layer: str, ours: str) -> list[Row]:
    """Make the rows of the fused projection of queries, keys and values in layers of a tower."""
    names = [tuple(f"{ours}attn.{name}_proj.{kind}" for name in "qkv") for kind in ("weight", "bias")]
    fused = [f"{layer}attn.qkv.{kind}" for kind in ("weight", "bias")]
    return [Row(one, parts, Split(("vision_dim",) * 3)) for one, parts in zip(fused, names, strict=True)]


def tower_names(start: str = "model.visual.") -> list[Row]:
    """Make the rows of a tower."""
    layer, ours = f"{start}blocks.{{block}}.", "encoder.layers.{block}."
    merger, deep = [("norm", "norm"), *_MERGER], [("merged_norm", "norm"), *_MERGER]
    return [
        Row(f"{start}patch_embed.proj.weight", "encoder.patch_embed.weight", FlatPatches()),
        Row(f"{start}patch_embed.proj.bias", "encoder.patch_embed.bias"),
        Row(f"{start}pos_embed.weight", "encoder.positions.table.weight"),
        *fused_qkv(layer, ours),
        *renamed_modules(layer, ours, _LAYER),
        *renamed_modules(f"{start}merger.", "encoder.projector.", merger),
        *renamed_modules(f"{start}deepstack_merger_list.{{deep}}.", "encoder.deep_projectors.{deep}.", deep),
    ]
