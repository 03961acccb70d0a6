"""Mistral 3 and Ministral 3 with Pixtral's vision tower, and Pixtral 12B, whose patches are not merged."""

from dataclasses import replace
from typing import Any

from torchtune.models._build_vision import build_image_text
from torchtune.models._description import ModelError
from torchtune.models._hf_config import MISTRAL
from torchtune.models._hf_fields import Fields
from torchtune.models._hf_vision import ImageTextFormat, TwoFormats, activation_name, read_activation
from torchtune.models._spec import ModelSpec
from torchtune.models._vision_description import ImageTextDescription, VisionDescription
from torchtune.models._vision_names import FlatPatches, image_text_names, renamed_modules
from torchtune.models._weight_names import HF_INTERLEAVED
from torchtune.models._weight_rows import Row
from torchtune.models.ministral3._model_builders import FORMAT as MINISTRAL
from torchtune.models.mistral3._processor import PixtralImages

_ARCHITECTURE, _LLAVA = "Mistral3ForConditionalGeneration", "LlavaForConditionalGeneration"


def _read_tower(fields: Fields, values: dict[str, Any], whole: Fields, last_layer: int) -> dict[str, Any]:
    if fields.peek("model_type") not in (None, "pixtral"):
        raise fields.refusal("model_type", fields.peek("model_type"))
    fields.take("image_size", None)  # rotary embeddings have no largest size
    if fields.take("head_dim", values["embed_dim"] // values["num_heads"]) * values["num_heads"] != values["embed_dim"]:
        raise fields.refusal("head_dim", fields.peek("head_dim"))
    for name, default, only in (("projector_hidden_act", "gelu", "gelu"), ("vision_feature_layer", last_layer, -1)):
        if (found := whole.take(name, default)) != only:
            raise whole.refusal(name, found)
    return {
        **dict.fromkeys(("patch_bias", "attn_bias", "attn_output_bias", "mlp_bias"), False),
        **dict.fromkeys(("mlp_gated", "first_norm"), True),
        "activation": read_activation(fields, "gelu"),
        "norm": "rms",
        "norm_eps": 1e-5,
        "rope": "alternating",
        "projector_dim": values["output_dim"],
    }


def _read(fields: Fields, values: dict[str, Any], whole: Fields) -> dict[str, Any]:
    return {
        **_read_tower(fields, values, whole, last_layer=-1),
        **dict.fromkeys(("merge_channels_first", "merge_reduces"), True),
        "merge_norm": "rms",
        "projector_bias": bool(whole.take("multimodal_projector_bias", False)),
    }


def _read_llava(fields: Fields, values: dict[str, Any], whole: Fields) -> dict[str, Any]:
    whole.take("image_seq_length", None)
    if (strategy := whole.take("vision_feature_select_strategy", "default")) != "full":
        raise whole.refusal("vision_feature_select_strategy", strategy)
    bias = bool(whole.take("multimodal_projector_bias", True))
    return {**_read_tower(fields, values, whole, last_layer=-2), "projector_bias": bias}


def _write(v: VisionDescription) -> dict[str, Any]:
    return {"hidden_act": activation_name(v.activation), "head_dim": v.head_dim}


def _write_more(d: ImageTextDescription) -> dict[str, Any]:
    if d.vision.merge_norm_eps != d.norm_eps:
        raise ModelError("vision: the norm of the projector has the eps of the text (norm_eps).")
    return {"multimodal_projector_bias": d.vision.projector_bias}


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
_FORMAT = ImageTextFormat(
    _ARCHITECTURE,
    "mistral3",
    (replace(MISTRAL, defaults=_TEXT_DEFAULTS), MINISTRAL),
    vision_type="pixtral",
    sizes=(
        ("hidden_size", "embed_dim", 1024),
        ("intermediate_size", "intermediate_dim", 4096),
        ("num_hidden_layers", "num_layers", 24),
        ("num_attention_heads", "num_heads", 16),
        ("num_channels", "num_channels", 3),
        ("patch_size", "patch_size", 16),
    ),
    whole_sizes=(("spatial_merge_size", "merge", 2),),
    tokens=(("image_token_index", 10),),
    read_vision=_read,
    write_vision=_write,
    ignored=("image_token_id",),
    write_more=_write_more,
)
_LLAVA_FORMAT = replace(
    _FORMAT,
    architecture=_LLAVA,
    model_type="llava",
    texts=(MISTRAL,),
    whole_sizes=(),
    read_vision=_read_llava,
    write_more=_write_llava,
)
_FORMATS = TwoFormats(_FORMAT, _LLAVA_FORMAT, _is_llava)
_LAYER = (
    ("attn.q_proj", "attention.q_proj"),
    ("attn.k_proj", "attention.k_proj"),
    ("attn.v_proj", "attention.v_proj"),
    ("attn.output_proj", "attention.o_proj"),
    ("mlp.w1", "feed_forward.gate_proj"),
    ("mlp.w2", "feed_forward.down_proj"),
    ("mlp.w3", "feed_forward.up_proj"),
)


def _tower_names(start: str) -> list[Row]:
    tower, projector = f"{start}vision_tower.", f"{start}multi_modal_projector."
    layer, ours = f"{tower}transformer.layers.{{block}}.", "encoder.layers.{block}."
    linears = [("mlp.w1", "linear_1"), ("mlp.w2", "linear_2")]
    return [
        Row(f"{tower}patch_conv.weight", "encoder.patch_embed.weight", FlatPatches()),
        Row(f"{tower}ln_pre.weight", "encoder.first_norm.scale"),
        *renamed_modules(layer, ours, _LAYER, ["weight"]),
        Row(f"{layer}attention_norm.weight", f"{ours}sa_norm.scale"),
        Row(f"{layer}ffn_norm.weight", f"{ours}mlp_norm.scale"),
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
SPEC = ModelSpec(
    name="mistral3",
    architectures=(_ARCHITECTURE, _LLAVA),
    from_hf_config=_FORMATS.read,
    to_hf_config=_FORMATS.write,
    weight_maps={"hf": replace(_NAMES, modules=_MODULES), "hf_modules": _NESTED},
    builder=build_image_text,
    image_processor=PixtralImages.from_config,
)
