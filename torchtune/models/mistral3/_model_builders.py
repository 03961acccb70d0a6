"""Mistral 3 and Ministral 3 with Pixtral's vision tower, and Pixtral 12B, which does not merge patches."""

from dataclasses import replace
from typing import Any

from torchtune.models._build_vision import image_text_family
from torchtune.models._description import ModelError
from torchtune.models._hf_config import MISTRAL
from torchtune.models._hf_fields import Fields
from torchtune.models._hf_vision import ImageTextFormat, TwoFormats
from torchtune.models._vision_description import ImageTextDescription
from torchtune.models._vision_names import (
    FlatPatches,
    attention_names,
    gated_names,
    image_text_names,
    renamed_modules,
    rms_norms,
)
from torchtune.models._weight_names import HF_INTERLEAVED
from torchtune.models._weight_rows import Row
from torchtune.models.ministral3._model_builders import FORMAT as MINISTRAL
from torchtune.models.mistral3._processor import PixtralImages

_ARCHITECTURE, _LLAVA = "Mistral3ForConditionalGeneration", "LlavaForConditionalGeneration"


def _read(fields: Fields, values: dict[str, Any], whole: Fields) -> dict[str, Any]:
    if fields.peek("model_type") not in (None, "pixtral"):
        raise fields.refusal("model_type", fields.peek("model_type"))
    whole.require(projector_hidden_act="gelu", vision_feature_layer=-1)
    return {"projector_dim": values["output_dim"]}


def _read_llava(fields: Fields, values: dict[str, Any], whole: Fields) -> dict[str, Any]:
    for name in ("vision_feature_layer", "vision_feature_select_strategy"):  # transformers has other defaults
        if not whole.has(name):
            raise whole.refusal(name, None)
    whole.require(vision_feature_select_strategy="full")
    return _read(fields, values, whole)


def _write_more(d: ImageTextDescription) -> dict[str, Any]:
    if d.vision.merge_norm_eps != d.norm_eps:
        raise ModelError("vision: the norm of the projector has the eps of the text (norm_eps).")
    return {}


def _write_llava(d: ImageTextDescription) -> dict[str, Any]:
    return {**_write_more(d), "vision_feature_layer": -1, "vision_feature_select_strategy": "full"}


def _is_llava(d: ImageTextDescription) -> bool:
    return not d.vision.merge_reduces


_TEXT_DEFAULTS = (
    ("num_key_value_heads", 8),
    ("head_dim", 128),
    ("max_position_embeddings", 131_072),
    ("rms_norm_eps", 1e-5),
    ("rope_theta", 1e9),
)
_TOWER = {
    **dict.fromkeys(("patch_bias", "attn_bias", "attn_output_bias", "mlp_bias"), False),
    **dict.fromkeys(("mlp_gated", "first_norm"), True),
    "norm": "rms",
    "norm_eps": 1e-5,
    "rope": "alternating",
}
_FORMAT = ImageTextFormat(
    _ARCHITECTURE,
    "mistral3",
    (replace(MISTRAL, defaults=_TEXT_DEFAULTS), MINISTRAL),
    vision_type="pixtral",
    own=(
        ("hidden_size", "embed_dim", 1024),
        ("intermediate_size", "intermediate_dim", 4096),
        ("num_hidden_layers", "num_layers", 24),
        ("num_attention_heads", "num_heads", 16),
        ("num_channels", "num_channels", 3),
        ("patch_size", "patch_size", 16),
    ),
    beside=(("spatial_merge_size", "merge", 2), ("multimodal_projector_bias", "projector_bias", False)),
    tokens=(("image_token_index", 10),),
    fixed={**_TOWER, **dict.fromkeys(("merge_channels_first", "merge_reduces"), True), "merge_norm": "rms"},
    derived=(("head_dim", "head_dim"),),
    unused=("image_size",),  # rotary embeddings have no largest size
    activation=("hidden_act", "gelu"),
    read_vision=_read,
    ignored=("image_token_id", "image_seq_length"),
    write_more=_write_more,
)
_LLAVA_FORMAT = replace(
    _FORMAT,
    architecture=_LLAVA,
    model_type="llava",
    texts=(MISTRAL,),
    beside=(("multimodal_projector_bias", "projector_bias", True),),
    fixed=_TOWER,
    read_vision=_read_llava,
    write_more=_write_llava,
)
_FORMATS = TwoFormats(_FORMAT, _LLAVA_FORMAT, _is_llava)
_LAYER = (*attention_names("attention"), *gated_names("feed_forward"))


def _tower_names(start: str) -> list[Row]:
    tower, projector = f"{start}vision_tower.", f"{start}multi_modal_projector."
    layer, ours = f"{tower}transformer.layers.{{block}}.", "encoder.layers.{block}."
    linears = [("mlp.w1", "linear_1"), ("mlp.w2", "linear_2")]
    return [
        Row(f"{tower}patch_conv.weight", "encoder.patch_embed.weight", FlatPatches()),
        Row(f"{tower}ln_pre.weight", "encoder.first_norm.scale"),
        *renamed_modules(layer, ours, _LAYER, ["weight"]),
        *rms_norms(layer, ours, [("sa_norm", "attention_norm"), ("mlp_norm", "ffn_norm")]),
        Row(f"{projector}norm.weight", "encoder.projector.norm.scale", when="reduces"),
        Row(f"{projector}patch_merger.merging_layer.weight", "encoder.projector.reduce.weight", when="reduces"),
        *renamed_modules(projector, "encoder.projector.", linears, ["weight"]),
        *(
            Row(f"{projector}{theirs}.bias", f"encoder.projector.{name}.bias", when="projects_with_bias")
            for name, theirs in linears
        ),
    ]


_NAMES = image_text_names(
    HF_INTERLEAVED, {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}, _tower_names("")
)
# transformers can save tensors under its module names.
_NESTED = image_text_names(HF_INTERLEAVED, {"model.": "model.language_model."}, _tower_names("model."))
_MODULES = (
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head.", "lm_head."),
    ("vision_tower.", "model.vision_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
)
SPEC = image_text_family(
    "mistral3",
    _FORMATS,
    {"hf": replace(_NAMES, modules=_MODULES), "hf_modules": _NESTED},
    PixtralImages,
)
