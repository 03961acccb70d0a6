"""Seed-OSS.

Llama's architecture with biases of queries, keys and values, and a flag for that of the output projection.
"""

from typing import Any

from torchtune.models._builders import model_builders
from torchtune.models._description import Description
from torchtune.models._hf_config import HFFormat
from torchtune.models._hf_fields import Fields
from torchtune.models._spec import family
from torchtune.models._weight_names import HF_HALF


def _read(fields: Fields) -> dict[str, Any]:
    fields.take("residual_dropout", 0.0)  # 0.1 in published files, but no training code applies it
    fields.take("attention_dropout", 0.0)
    return {"attn_output_bias": bool(fields.take("attention_out_bias", False)), "attn_dropout": 0.0}


def _write(d: Description) -> dict[str, Any]:
    return {"attention_out_bias": d.attn_output_bias, "residual_dropout": 0.0}


FORMAT = HFFormat(
    "SeedOssForCausalLM",
    "seed_oss",
    "half",
    biases="attention_bias",
    output_bias=False,
    has_mlp_bias=True,
    read_more=_read,
    write_more=_write,
    defaults={
        "attention_bias": True,
        "head_dim": 128,
        "max_position_embeddings": 524_288,
        "num_key_value_heads": 8,
    },
)
SPEC = family("seed_oss", FORMAT, HF_HALF)

SIZES = {
    "seed_oss_36b": FORMAT.describe(
        vocab_size=155_136,
        num_layers=64,
        embed_dim=5120,
        intermediate_dim=27_648,
        max_seq_len=524_288,
        num_heads=80,
        num_kv_heads=8,
        head_dim=128,
        q_bias=True,
        k_bias=True,
        v_bias=True,
        rope_base=10_000_000.0,
        norm_eps=1e-6,
    ),
}
BUILDERS = model_builders(__name__, "Seed-OSS", SPEC, SIZES)
seed_oss_36b = BUILDERS["seed_oss_36b"]
lora_seed_oss_36b = BUILDERS["lora_seed_oss_36b"]
qlora_seed_oss_36b = BUILDERS["qlora_seed_oss_36b"]

__all__ = ["SPEC", *BUILDERS]
