"""Tower of Qwen 3-VL and Qwen 3.5: its ``config.json`` and weight names."""

from functools import partial
from typing import Any

from torchtune.models._build_vision import ImageTextFormat, VisionDescription
from torchtune.models._family import Fields, FlatPatches, HFFormat, Row, Split, module_rows

# Fields of a tower: their name, our name, default.
TOWER_FIELDS = (
    ("depth", "num_layers", 27),
    ("hidden_size", "embed_dim", 1152),
    ("intermediate_size", "intermediate_dim", 4304),
    ("num_heads", "num_heads", 16),
    ("in_channels", "num_channels", 3),
    ("patch_size", "patch_size", 16),
    ("temporal_patch_size", "frames_per_patch", 2),
    ("spatial_merge_size", "merge", 2),
    ("out_hidden_size", "output_dim", 3584),
    ("hidden_act", "activation", "gelu_pytorch_tanh"),
)


def _read(fields: Fields, values: dict[str, Any], whole: Fields, deep_layers: list[int]) -> dict[str, Any]:
    table = fields.typed("num_position_embeddings", 2304)
    side = round(table**0.5)
    if side * side != table:
        raise fields.refusal("num_position_embeddings", table)
    return {
        "positions_side": side,
        "projector_dim": values["embed_dim"] * values["merge"] ** 2,
        "deep_layers": tuple(fields.list_of("deepstack_visual_indexes", 27, int, deep_layers)),
    }


def _write(v: VisionDescription) -> dict[str, Any]:
    return {"num_position_embeddings": v.positions_side**2, "deepstack_visual_indexes": list(v.deep_layers)}


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
        text,
        vision_type=f"{model_type}_vision",
        own=TOWER_FIELDS,
        fixed={"positions": "interpolated", "rope": "axial", "merge_norm": "layer", "merge_norm_eps": 1e-6},
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
    return [Row(one, parts, Split(("vision.embed_dim",) * 3)) for one, parts in zip(fused, names, strict=True)]


def tower_names() -> list[Row]:
    """Make the rows of a tower."""
    layer, ours = "model.visual.blocks.{block}.", "encoder.layers.{block}."
    merger, deep = [("norm", "norm"), *_MERGER], [("merged_norm", "norm"), *_MERGER]
    return [
        Row("model.visual.patch_embed.proj.weight", "encoder.patch_embed.weight", FlatPatches()),
        Row("model.visual.patch_embed.proj.bias", "encoder.patch_embed.bias"),
        Row("model.visual.pos_embed.weight", "encoder.positions.table.weight"),
        *fused_qkv(layer, ours),
        *module_rows(layer, ours, _LAYER),
        *module_rows("model.visual.merger.", "encoder.projector.", merger),
        *module_rows("model.visual.deepstack_merger_list.{deep}.", "encoder.deep_projectors.{deep}.", deep),
    ]
