"""SmolVLM 2 and Idefics 3: Llama with a SigLIP tower over tiles of an image."""

from dataclasses import replace
from typing import Any

from torchtune.models._build_vision import build_image_text
from torchtune.models._hf_config import LLAMA
from torchtune.models._hf_fields import Fields
from torchtune.models._hf_vision import ImageTextFormat, activation_name, read_activation, read_whole
from torchtune.models._spec import ModelSpec
from torchtune.models._vision_description import VisionDescription
from torchtune.models._vision_names import FlatPatches, image_text_names, renamed_modules
from torchtune.models._weight_names import HF_INTERLEAVED
from torchtune.models._weight_rows import Row
from torchtune.models.smolvlm._processor import TiledImages

_UNUSED = ("max_image_size", "size", "tie_word_embeddings", "use_base_siglip")


def _read(fields: Fields, values: dict[str, Any], whole: Fields) -> dict[str, Any]:
    for name in _UNUSED:
        fields.take(name, None)
    return {
        "activation": read_activation(fields, "gelu_pytorch_tanh"),
        "norm_eps": fields.take("layer_norm_eps", 1e-6),
        "last_norm": True,
        "positions": "interpolated",
        "positions_side": read_whole(fields, "image_size", 224) // values["patch_size"],
        "projector_bias": False,
    }


def _write(v: VisionDescription) -> dict[str, Any]:
    return {
        "hidden_act": activation_name(v.activation),
        "layer_norm_eps": v.norm_eps,
        "image_size": v.positions_side * v.patch_size,
    }


FORMAT = ImageTextFormat(
    "SmolVLMForConditionalGeneration",
    "smolvlm",
    (replace(LLAMA, defaults=(*LLAMA.defaults, ("rms_norm_eps", 1e-5))),),
    vision_type="smolvlm_vision",
    sizes=(
        ("hidden_size", "embed_dim", 1152),
        ("intermediate_size", "intermediate_dim", 3072),
        ("num_hidden_layers", "num_layers", 12),
        ("num_attention_heads", "num_heads", 16),
        ("num_channels", "num_channels", 3),
        ("patch_size", "patch_size", 32),
    ),
    whole_sizes=(("scale_factor", "merge", 2),),
    tokens=(("image_token_id", 128_257),),
    read_vision=_read,
    write_vision=_write,
    ignored=("use_cache", "vocab_size", "image_seq_len", "use_reentrant_checkpoint"),
)
_LAYER = (
    ("sa_norm", "layer_norm1"),
    ("attn.q_proj", "self_attn.q_proj"),
    ("attn.k_proj", "self_attn.k_proj"),
    ("attn.v_proj", "self_attn.v_proj"),
    ("attn.output_proj", "self_attn.out_proj"),
    ("mlp_norm", "layer_norm2"),
    ("mlp.w1", "mlp.fc1"),
    ("mlp.w2", "mlp.fc2"),
)
_TOWER = "model.vision_model."
_ROWS = [
    Row(f"{_TOWER}embeddings.patch_embedding.weight", "encoder.patch_embed.weight", FlatPatches()),
    Row(f"{_TOWER}embeddings.patch_embedding.bias", "encoder.patch_embed.bias"),
    Row(f"{_TOWER}embeddings.position_embedding.weight", "encoder.positions.table.weight"),
    *renamed_modules(f"{_TOWER}encoder.layers.{{block}}.", "encoder.layers.{block}.", _LAYER),
    *renamed_modules(_TOWER, "encoder.", [("norm", "post_layernorm")]),
    Row("model.connector.modality_projection.proj.weight", "encoder.projector.mlp.weight"),
]
SPEC = ModelSpec(
    name="smolvlm",
    architectures=("SmolVLMForConditionalGeneration",),
    from_hf_config=FORMAT.read,
    to_hf_config=FORMAT.write,
    weight_maps={"hf": image_text_names(HF_INTERLEAVED, {"model.": "model.text_model."}, _ROWS)},
    builder=build_image_text,
    image_processor=TiledImages.from_config,
)
