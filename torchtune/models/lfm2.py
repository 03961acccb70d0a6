"""LFM2 and LFM2.5, the dense models.

Most layers are gated short convolutions; the others have attention.
"""

from dataclasses import replace
from typing import Any

from torchtune.models._builders import model_builders
from torchtune.models._description import Description
from torchtune.models._hf_config import HFFormat
from torchtune.models._hf_fields import Fields, layers_of_type, write_layer_types
from torchtune.models._hf_layers import require_silu
from torchtune.models._mixers import ShortConvMixer
from torchtune.models._spec import family
from torchtune.models._weight_names import HF_HALF, mixers, renamed

RENAMED = {
    "model.norm.": "model.embedding_norm.",
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "self_attn.out_proj",
    "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
}


def read_layers(fields: Fields) -> dict[str, Any]:
    """Read the convolution layers and ``tie_word_embeddings`` of LFM2 models, with or without experts."""
    num_layers = fields.take("num_hidden_layers")
    layer_types = fields.layer_types(num_layers)
    attn_layers = fields.list_of("full_attn_idxs", num_layers, int)
    conv_layers: tuple[int, ...] = ()
    if layer_types is not None:
        conv_layers = layers_of_type(layer_types[:num_layers], "conv")
    elif attn_layers is not None:
        conv_layers = tuple(layer for layer in range(num_layers) if layer not in attn_layers)
    require_silu(fields)  # transformers ignores the field
    conv_taps = fields.take("conv_L_cache", 3)
    return {
        "mixer": ShortConvMixer(conv_taps=conv_taps) if conv_layers else None,
        "mixer_layers": conv_layers,
        "tie_word_embeddings": bool(fields.take("tie_embedding", fields.take("tie_word_embeddings", True))),
    }


def _read(fields: Fields) -> dict[str, Any]:
    values = read_layers(fields)
    intermediate_dim = fields.take("block_ff_dim", fields.take("intermediate_size", 12_288))
    factor = fields.take("block_ffn_dim_multiplier", 1.0)
    multiple = fields.take("block_multiple_of", 256)
    if fields.take("block_auto_adjust_ff_dim", True):
        # As in Llama: two thirds, times a factor, rounded up to a multiple.
        adjusted = int(factor * int(2 * intermediate_dim / 3))
        intermediate_dim = -(-adjusted // multiple) * multiple
    return {**values, "intermediate_dim": intermediate_dim}


def write_layers(d: Description) -> dict[str, Any]:
    """Write the fields of :func:`read_layers`."""
    return {
        "layer_types": write_layer_types(d.num_layers, d.mixer_layers, "conv"),
        "conv_L_cache": d.mixer.conv_taps if d.mixer else 3,
    }


def _write(d: Description) -> dict[str, Any]:
    return {**write_layers(d), "block_auto_adjust_ff_dim": False}


FORMAT = HFFormat(
    "Lfm2ForCausalLM",
    "lfm2",
    "half",
    qk_norm="before_rope",
    mixer_layer_type="conv",
    eps_field="norm_eps",
    required_values={"conv_bias": False},
    # Fields of published files that transformers does not read: repeated sizes, and the initialization of weights.
    unused=tuple(
        """block_dim block_norm_eps block_mlp_init_scale block_out_init_scale block_use_swiglu block_use_xavier_init
        conv_dim conv_dim_out conv_use_xavier_init num_heads theta use_pos_enc""".split()
    ),
    read_more=_read,
    write_more=_write,
    defaults={
        "intermediate_size": 12_288,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128_000,
        "norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
    },
)
SPEC = family("lfm2", FORMAT, mixers(renamed(HF_HALF, RENAMED), ShortConvMixer.names))

_CONV_LAYERS = tuple(layer for layer in range(16) if layer not in (2, 5, 8, 10, 12, 14))
_1_2B = FORMAT.describe(
    vocab_size=65_536,
    num_layers=16,
    embed_dim=2048,
    intermediate_dim=8192,
    max_seq_len=128_000,
    num_heads=32,
    num_kv_heads=8,
    mixer=ShortConvMixer(),
    mixer_layers=_CONV_LAYERS,
    rope_base=1_000_000.0,
    norm_eps=1e-5,
    tie_word_embeddings=True,
)
SIZES = {
    "lfm2_350m": replace(_1_2B, embed_dim=1024, intermediate_dim=4608, num_heads=16, head_dim=64),
    "lfm2_700m": replace(_1_2B, embed_dim=1536, intermediate_dim=6912, num_heads=24, head_dim=64),
    "lfm2_1_2b": _1_2B,
}
BUILDERS = model_builders(__name__, "LFM2", SPEC, SIZES)
lfm2_350m = BUILDERS["lfm2_350m"]
lora_lfm2_350m = BUILDERS["lora_lfm2_350m"]
qlora_lfm2_350m = BUILDERS["qlora_lfm2_350m"]
lfm2_700m = BUILDERS["lfm2_700m"]
lora_lfm2_700m = BUILDERS["lora_lfm2_700m"]
qlora_lfm2_700m = BUILDERS["qlora_lfm2_700m"]
lfm2_1_2b = BUILDERS["lfm2_1_2b"]
lora_lfm2_1_2b = BUILDERS["lora_lfm2_1_2b"]
qlora_lfm2_1_2b = BUILDERS["qlora_lfm2_1_2b"]

__all__ = ["SPEC", *BUILDERS]
