"""SmolVLM 2 and Idefics 3: Llama with a SigLIP tower over tiles of an image."""

from dataclasses import replace
from typing import Any

from torchtune.models._build_vision import ImageTextFormat, VisionDescription, image_text_family
from torchtune.models._family import HF_INTERLEAVED, LLAMA, Fields, FlatPatches, Row, attention_names, module_rows
from torchtune.models.smolvlm._processor import TiledImages


def _read(fields: Fields, values: dict[str, Any], whole: Fields) -> dict[str, Any]:
    return {"positions_side": fields.typed("image_size", 224) // values["patch_size"]}


def _write(v: VisionDescription) -> dict[str, Any]:
    return {"image_size": v.positions_side * v.patch_size}


FORMAT = ImageTextFormat(
    "SmolVLMForConditionalGeneration",
    "smolvlm",
    replace(LLAMA, defaults=(*LLAMA.defaults, ("rms_norm_eps", 1e-5))),
    vision_type="smolvlm_vision",
    own=(
        *ImageTextFormat.sizes(embed_dim=1152, intermediate_dim=3072, num_layers=12, num_heads=16, patch_size=32),
        ("num_channels", "num_channels", 3),
        ("layer_norm_eps", "norm_eps", 1e-6),
        ("hidden_act", "activation", "gelu_pytorch_tanh"),
    ),
    outer_fields=(("scale_factor", "merge", 2),),
    tokens=(("image_token_id", 128_257),),
    fixed={"last_norm": True, "positions": "interpolated", "projector_bias": False},
    unused=("max_image_size", "size", "tie_word_embeddings", "use_base_siglip"),
    read_vision=_read,
    write_vision=_write,
    ignored=("use_cache", "vocab_size", "image_seq_len", "use_reentrant_checkpoint"),
)
_LAYER = (
    ("sa_norm", "layer_norm1"),
    *attention_names(output="out_proj"),
    ("mlp_norm", "layer_norm2"),
    ("mlp.w1", "mlp.fc1"),
    ("mlp.w2", "mlp.fc2"),
)
_TOWER = "model.vision_model."
_ROWS = [
    Row(f"{_TOWER}embeddings.patch_embedding.weight", "encoder.patch_embed.weight", FlatPatches()),
    Row(f"{_TOWER}embeddings.patch_embedding.bias", "encoder.patch_embed.bias"),
    Row(f"{_TOWER}embeddings.position_embedding.weight", "encoder.positions.table.weight"),
    *module_rows(f"{_TOWER}encoder.layers.{{block}}.", "encoder.layers.{block}.", _LAYER),
    *module_rows(_TOWER, "encoder.", [("norm", "post_layernorm")]),
    Row("model.connector.modality_projection.proj.weight", "encoder.projector.mlp.weight"),
]
NAMES = HF_INTERLEAVED.prefixed({"model.": "model.text_model."}, "decoder.").extended(_ROWS)
SPEC = image_text_family("smolvlm", [FORMAT], NAMES, TiledImages)
