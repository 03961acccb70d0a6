"""MiniMax-M2.

256 experts with sigmoid routers and a selection bias, norms over all heads together, and partial RoPE. Fields of other
models of MiniMax (linear attention, a shared expert, other factors of norms) must have the values that turn them off.
"""

from typing import Any

from torchtune.models._builders import model_builders
from torchtune.models._hf_config import HFFormat
from torchtune.models._hf_fields import Fields
from torchtune.models._spec import family
from torchtune.models._weight_names import HF_HALF, experts


def _read(fields: Fields) -> dict[str, Any]:
    attention_types = fields.list_of("attn_type_list", fields.take("num_hidden_layers"), int, default=[])
    if any(attention_type != 1 for attention_type in attention_types):  # 0: linear attention
        raise fields.refusal("attn_type_list", attention_types)
    return {}


_FORMAT = HFFormat(
    "MiniMaxM2ForCausalLM",
    "minimax_m2",
    "half",
    qk_norm="before_rope",
    ropes=("partial", "dim"),
    fixed={
        "qk_norm_whole": True,
        "router_scores": "sigmoid",
        "router_normalize": True,
        "router_selection_bias": True,
    },
    extra_fields=(
        ("num_local_experts", "num_experts", 256),
        ("num_experts_per_tok", "experts_per_token", 8),
        ("intermediate_size", "expert_dim", 1536),
        ("router_aux_loss_coef", "router_balance", 0.001),
    ),
    required_values={
        "qk_norm_type": "per_layer",
        "scoring_func": "sigmoid",
        "use_qk_norm": True,
        "use_routing_bias": True,
        "layernorm_full_attention_beta": 1.0,
        "layernorm_linear_attention_beta": 1.0,
        "layernorm_mlp_beta": 1.0,
    },
    unused=("mlp_intermediate_size", "mtp_transformer_layers", "num_mtp_modules", "shared_moe_mode", "use_mtp"),
    read_more=_read,
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 196_608,
        "rope_theta": 5_000_000.0,
    },
)
SPEC = family("minimax_m2", _FORMAT, experts(HF_HALF, "block_sparse_moe", "w1", "w3", "w2", "e_score_correction_bias"))

SIZES = {
    "minimax_m2": _FORMAT.describe(
        vocab_size=200_064,
        num_layers=62,
        embed_dim=3072,
        intermediate_dim=1536,
        max_seq_len=196_608,
        num_heads=48,
        num_kv_heads=8,
        head_dim=128,
        rope_base=5_000_000.0,
        rope_dim=64,
        num_experts=256,
        experts_per_token=8,
        expert_dim=1536,
        router_balance=0.001,
        norm_eps=1e-6,
    ),
}
BUILDERS = model_builders(__name__, "MiniMax-M2", SPEC, SIZES)
minimax_m2 = BUILDERS["minimax_m2"]
lora_minimax_m2 = BUILDERS["lora_minimax_m2"]
qlora_minimax_m2 = BUILDERS["qlora_minimax_m2"]

__all__ = ["SPEC", *BUILDERS]
