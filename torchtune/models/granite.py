"""Granite 3.

Llama's architecture with constant factors of embeddings, residuals, attention scores and logits, as in maximal update
parametrization (https://arxiv.org/abs/2203.03466).
"""

from typing import Any

from torchtune.models._builders import model_builders
from torchtune.models._description import Description
from torchtune.models._hf_config import HFFormat
from torchtune.models._hf_fields import Fields
from torchtune.models._spec import family
from torchtune.models._weight_map import Identity
from torchtune.models._weight_names import hf_names


def read_multipliers(fields: Fields) -> dict[str, Any]:
    """Read the factors of logits and attention scores, which Granite 3 and 4 share."""
    num_heads = fields.take("num_attention_heads")
    head_dim = fields.take("head_dim", 0) or fields.take("hidden_size") // num_heads
    scale = float(fields.take("attention_multiplier", 1.0))
    return {
        "hidden_scale": 1.0 / float(fields.take("logits_scaling", 1.0)),
        "attn_scale": None if scale == head_dim**-0.5 else scale,
    }


def write_multipliers(d: Description) -> dict[str, Any]:
    """Write the fields of :func:`read_multipliers`."""
    return {
        "logits_scaling": 1.0 / d.hidden_scale,
        "attention_multiplier": d.head_dim**-0.5 if d.attn_scale is None else d.attn_scale,
    }


FORMAT = HFFormat(
    "GraniteForCausalLM",
    "granite",
    "half",
    biases="attention_bias",
    has_mlp_bias=True,
    extra_fields=(("embedding_multiplier", "embed_scale", 1.0), ("residual_multiplier", "residual_scale", 1.0)),
    read_more=read_multipliers,
    write_more=write_multipliers,
    defaults={"max_position_embeddings": 2048},
)
SPEC = family("granite", FORMAT, hf_names(Identity()))

_COMMON = {
    "num_layers": 40,
    "max_seq_len": 131_072,
    "num_heads": 32,
    "num_kv_heads": 8,
    "embed_scale": 12.0,
    "residual_scale": 0.22,
    "tie_word_embeddings": True,
}

SIZES = {
    "granite3_1_2b": FORMAT.describe(
        **_COMMON,
        vocab_size=49_155,
        embed_dim=2048,
        intermediate_dim=8192,
        rope_base=5_000_000.0,
        hidden_scale=1 / 8,
        attn_scale=0.015625,
    ),
    "granite3_1_8b": FORMAT.describe(
        **_COMMON,
        vocab_size=49_155,
        embed_dim=4096,
        intermediate_dim=12_800,
        rope_base=10_000_000.0,
        hidden_scale=1 / 16,
        attn_scale=0.0078125,
    ),
}
BUILDERS = model_builders(__name__, "Granite 3", SPEC, SIZES)
granite3_1_2b = BUILDERS["granite3_1_2b"]
lora_granite3_1_2b = BUILDERS["lora_granite3_1_2b"]
qlora_granite3_1_2b = BUILDERS["qlora_granite3_1_2b"]
granite3_1_8b = BUILDERS["granite3_1_8b"]
lora_granite3_1_8b = BUILDERS["lora_granite3_1_8b"]
qlora_granite3_1_8b = BUILDERS["qlora_granite3_1_8b"]

__all__ = ["SPEC", *BUILDERS]
