"""Ministral 3.

The text decoders: Mistral with YaRN, and queries scaled by their position as in Llama 4.
"""

from dataclasses import replace

from torchtune.models._builders import model_builders
from torchtune.models._description import YarnRopeScaling
from torchtune.models._hf_config import HFFormat
from torchtune.models._hf_rope import write_growth, write_scaling
from torchtune.models._spec import family
from torchtune.models._weight_names import HF_INTERLEAVED

_YARN = YarnRopeScaling(
    factor=16.0, original_max_seq_len=16_384, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0
)

# What transformers assumes without rope_parameters.
_DEFAULT_ROPE = {**(write_scaling(_YARN) or {}), "rope_theta": 1e6, "llama_4_scaling_beta": 0.1}


FORMAT = HFFormat(
    "Ministral3ForCausalLM",
    "ministral3",
    "interleaved",
    windows="sliding_window",
    ropes=("growth",),
    write_more=write_growth,
    defaults={
        "head_dim": 128,
        "max_position_embeddings": 262_144,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _DEFAULT_ROPE,
    },
)
SPEC = family("ministral3", FORMAT, HF_INTERLEAVED)

_8B = FORMAT.describe(
    vocab_size=131_072,
    num_layers=34,
    embed_dim=4096,
    intermediate_dim=14_336,
    max_seq_len=262_144,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope_base=1_000_000.0,
    rope_scaling=_YARN,
    query_growth=0.1,
    query_growth_span=16_384,
    norm_eps=1e-5,
)
SIZES = {
    "ministral3_3b": replace(_8B, num_layers=26, embed_dim=3072, intermediate_dim=9216, tie_word_embeddings=True),
    "ministral3_8b": _8B,
}
BUILDERS = model_builders(__name__, "Ministral 3", SPEC, SIZES)
ministral3_3b = BUILDERS["ministral3_3b"]
lora_ministral3_3b = BUILDERS["lora_ministral3_3b"]
qlora_ministral3_3b = BUILDERS["qlora_ministral3_3b"]
ministral3_8b = BUILDERS["ministral3_8b"]
lora_ministral3_8b = BUILDERS["lora_ministral3_8b"]
qlora_ministral3_8b = BUILDERS["qlora_ministral3_8b"]

__all__ = ["SPEC", *BUILDERS]
