"""Mixtral.

Mistral's layers with eight experts, two per token (https://arxiv.org/abs/2401.04088).
"""

from dataclasses import replace

from torchtune.models._builders import model_builders
from torchtune.models._hf_config import HFFormat
from torchtune.models._spec import family
from torchtune.models._weight_names import HF_INTERLEAVED, experts

_FORMAT = HFFormat(
    "MixtralForCausalLM",
    "mixtral",
    "interleaved",
    windows="sliding_window",
    fixed={"router_normalize": True},
    extra_fields=(
        ("num_local_experts", "num_experts", 8),
        ("num_experts_per_tok", "experts_per_token", 2),
        ("intermediate_size", "expert_dim", 14_336),
        ("router_aux_loss_coef", "router_balance", 0.001),
    ),
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
)
SPEC = family("mixtral", _FORMAT, experts(HF_INTERLEAVED, "block_sparse_moe", "w1", "w3", "w2"))

_8X7B = _FORMAT.describe(
    vocab_size=32_000,
    num_layers=32,
    embed_dim=4096,
    intermediate_dim=14_336,
    max_seq_len=32_768,
    num_heads=32,
    num_kv_heads=8,
    rope_base=1_000_000.0,
    num_experts=8,
    experts_per_token=2,
    expert_dim=14_336,
    router_balance=0.02,
)
_8X22B = replace(
    _8X7B,
    num_layers=56,
    embed_dim=6144,
    intermediate_dim=16_384,
    expert_dim=16_384,
    max_seq_len=65_536,
    num_heads=48,
    head_dim=128,
    router_balance=0.001,
)

SIZES = {
    "mixtral_8x7b": _8X7B,
    "mixtral_8x22b": _8X22B,
    "mixtral_8x22b_instruct": replace(_8X22B, vocab_size=32_768),
}
BUILDERS = model_builders(__name__, "Mixtral", SPEC, SIZES)
mixtral_8x7b = BUILDERS["mixtral_8x7b"]
lora_mixtral_8x7b = BUILDERS["lora_mixtral_8x7b"]
qlora_mixtral_8x7b = BUILDERS["qlora_mixtral_8x7b"]
mixtral_8x22b = BUILDERS["mixtral_8x22b"]
lora_mixtral_8x22b = BUILDERS["lora_mixtral_8x22b"]
qlora_mixtral_8x22b = BUILDERS["qlora_mixtral_8x22b"]
mixtral_8x22b_instruct = BUILDERS["mixtral_8x22b_instruct"]
lora_mixtral_8x22b_instruct = BUILDERS["lora_mixtral_8x22b_instruct"]
qlora_mixtral_8x22b_instruct = BUILDERS["qlora_mixtral_8x22b_instruct"]

__all__ = ["SPEC", *BUILDERS]
