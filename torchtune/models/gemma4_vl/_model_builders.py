"""Gemma 4 with its vision tower (E2B, E4B, 26B-A4B, 31B)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchtune.models._build_vision import build_image_text
from torchtune.models._description import Description
from torchtune.models._hf_fields import Fields
from torchtune.models._hf_vision import ImageTextFormat, activation_name, read_activation, read_whole
from torchtune.models._vision_description import ImageTextDescription, VisionDescription
from torchtune.models._vision_names import image_text_names, renamed_modules
from torchtune.models._weight_ops import ExternalSlice, Op, Slices
from torchtune.models._weight_rows import Row
from torchtune.models.gemma4._model_builders import FORMAT
from torchtune.models.gemma4._model_builders import SPEC as TEXT
from torchtune.models.gemma4_vl._processor import GemmaImages

_ARCHITECTURE = "Gemma4ForConditionalGeneration"


def _read(fields: Fields, values: dict[str, Any], whole: Fields) -> dict[str, Any]:
    heads, width = values["num_heads"], values["embed_dim"]
    for name, wanted in (("num_key_value_heads", heads), ("head_dim", width // heads)):
        if fields.take(name, wanted) != wanted:
            raise fields.refusal(name, fields.peek(name))
    for name in ("max_position_embeddings", "layer_types", "default_output_length"):
        fields.take(name, None)  # they do not change the tower
    return {
        "patch_bias": False,
        **dict.fromkeys(("attn_bias", "attn_output_bias", "mlp_bias", "projector_bias"), False),
        **dict.fromkeys(("mlp_gated", "post_norms", "head_norms", "merge_pools"), True),
        "attn_scale": 1.0,
        "activation": read_activation(fields, "gelu_pytorch_tanh", "hidden_activation"),
        "norm": "rms",
        "norm_eps": fields.take("rms_norm_eps", 1e-6),
        "merge_norm_eps": fields.take("rms_norm_eps", 1e-6),
        "clipped": bool(fields.take("use_clipped_linears", False)),
        "merge_standardized": bool(fields.take("standardize", False)),
        "positions": "axes",
        "positions_side": read_whole(fields, "position_embedding_size", 10_240),
        "rope": "halves",
    }


def _write(v: VisionDescription) -> dict[str, Any]:
    return {
        "num_key_value_heads": v.num_heads,
        "head_dim": v.head_dim,
        "hidden_activation": activation_name(v.activation),
        "rms_norm_eps": v.norm_eps,
        "use_clipped_linears": v.clipped,
        "standardize": v.merge_standardized,
        "position_embedding_size": v.positions_side,
    }


def _read_more(config: Mapping[str, Any]) -> dict[str, Any]:
    text = config["text_config"]
    pad = text.get("pad_token_id", 0)
    return {"pad_token": pad, "image_blocks": text.get("use_bidirectional_attention") == "vision"}


def _write_more(d: ImageTextDescription) -> dict[str, Any]:
    kind = "vision" if d.image_blocks else None
    return {"text_config": {"pad_token_id": d.pad_token, "use_bidirectional_attention": kind}}


_TOWER_SIZES = (
    ("hidden_size", "embed_dim", 768),
    ("intermediate_size", "intermediate_dim", 3072),
    ("num_hidden_layers", "num_layers", 16),
    ("num_attention_heads", "num_heads", 12),
    ("pooling_kernel_size", "merge", 3),
    ("patch_size", "patch_size", 16),
)
_FORMAT = ImageTextFormat(
    _ARCHITECTURE,
    "gemma4",
    (FORMAT,),
    vision_type="gemma4_vision",
    sizes=_TOWER_SIZES,
    tokens=(("image_token_id", 258_880), ("video_token_id", 258_884)),
    read_vision=_read,
    write_vision=_write,
    rope_base=100.0,
    tied=True,
    ignored=(
        *("boi_token_id", "eoi_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index", "audio_token_id"),
        *("audio_config", "vision_soft_tokens_per_image"),
    ),
    read_more=_read_more,
    write_more=_write_more,
)


@dataclass(frozen=True)
class _Scalars(Op):
    """Op between scalars and a vector of them."""

    def to_tune(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        return [torch.stack(list(tensors))]

    def to_external(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        return [part.clone() for part in tensors[0].unbind()]

    def external_slices(
        self, which: int, slices: Slices, shapes: Sequence[Sequence[int]], description: Description
    ) -> list[ExternalSlice]:
        return [ExternalSlice(i, (), i - slices[0].start) for i in range(slices[0].start, slices[0].stop)]


_TOWER, _OURS = "model.vision_tower.", "encoder.layers.{block}."
_LINEARS = (
    ("attn.q_proj", "self_attn.q_proj"),
    ("attn.k_proj", "self_attn.k_proj"),
    ("attn.v_proj", "self_attn.v_proj"),
    ("attn.output_proj", "self_attn.o_proj"),
    ("mlp.w1", "mlp.gate_proj"),
    ("mlp.w2", "mlp.down_proj"),
    ("mlp.w3", "mlp.up_proj"),
)
_NORMS = (
    ("sa_norm.scale", "input_layernorm.weight"),
    ("sa_scale.scale", "post_attention_layernorm.weight"),
    ("mlp_norm.scale", "pre_feedforward_layernorm.weight"),
    ("mlp_scale.scale", "post_feedforward_layernorm.weight"),
    ("attn.q_norm.scale", "self_attn.q_norm.weight"),
    ("attn.k_norm.scale", "self_attn.k_norm.weight"),
)


def _tower_names() -> list[Row]:
    layer = f"{_TOWER}encoder.layers.{{block}}."
    linears, bounds = [], ("input_min", "input_max", "output_min", "output_max")
    for ours, theirs in _LINEARS:
        linears += [
            Row(f"{layer}{theirs}.linear.weight", f"{_OURS}{ours}.weight", when="clips_not"),
            Row(f"{layer}{theirs}.linear.weight", f"{_OURS}{ours}.linear.weight", when="clips"),
            Row(tuple(f"{layer}{theirs}.{name}" for name in bounds), f"{_OURS}{ours}.bounds", _Scalars(), "clips"),
        ]
    return [
        Row(f"{_TOWER}patch_embedder.input_proj.weight", "encoder.patch_embed.weight"),
        Row(f"{_TOWER}patch_embedder.position_embedding_table", "encoder.positions.tables"),
        *linears,
        *(Row(f"{layer}{theirs}", f"{_OURS}{ours}") for ours, theirs in _NORMS),
        Row(f"{_TOWER}std_bias", "encoder.projector.std_bias", when="standardizes"),
        Row(f"{_TOWER}std_scale", "encoder.projector.std_scale", when="standardizes"),
        *renamed_modules("model.embed_vision.", "encoder.projector.", [("mlp", "embedding_projection")], ["weight"]),
    ]


SPEC = replace(
    TEXT,
    name="gemma4_vl",
    architectures=(_ARCHITECTURE,),
    from_hf_config=_FORMAT.read,
    to_hf_config=_FORMAT.write,
    weight_maps={"hf": image_text_names(TEXT.weight_map(), {"model.": "model.language_model."}, _tower_names())},
    untrained=("model.audio_tower.", "model.embed_audio."),
    layers_prefix="model.language_model.layers.",
    builder=build_image_text,
    image_processor=GemmaImages.from_config,
)
