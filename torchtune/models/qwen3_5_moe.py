"""Qwen 3.5 and 3.6, the mixtures of experts.

Qwen 3.5's layers with experts and a gated shared expert.
"""

from torchtune.models._builders import model_builders
from torchtune.models._hf_config import HFFormat
from torchtune.models._hf_fields import all_but_every
from torchtune.models._hf_layers import read_delta_net, write_delta_net
from torchtune.models._mixers import DeltaNetMixer
from torchtune.models._spec import family
from torchtune.models._weight_names import HF_HALF, experts, mixers, shared_expert, with_fused_experts

FORMAT = HFFormat(
    "Qwen3_5MoeForCausalLM",
    "qwen3_5_moe_text",
    "half",
    biases="attention_bias",
    qk_norm="before_rope",
    mixer_layer_type="linear_attention",
    ropes=("partial", "sections"),
    fixed={
        "attn_gate": True,
        "norm_unit_offset": True,
        "shared_expert_gate": True,
        "router_normalize": True,
    },
    extra_fields=(
        ("num_experts", "num_experts", 256),
        ("num_experts_per_tok", "experts_per_token", 8),
        ("moe_intermediate_size", "expert_dim", 512),
        ("shared_expert_intermediate_size", "shared_expert_dim", 512),
        ("router_aux_loss_coef", "router_balance", 0.001),
    ),
    read_more=read_delta_net,
    write_more=write_delta_net,
    defaults={
        "intermediate_size": 1,  # unused and absent: no layer is dense
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32_768,
        "partial_rotary_factor": 0.25,
    },
)
_EXPERTS = experts(mixers(HF_HALF, DeltaNetMixer.names), "mlp", "gate_proj", "up_proj", "down_proj")
_NAMES = shared_expert(_EXPERTS, "mlp.shared_expert", "mlp.shared_expert_gate")
SPEC = family(
    "qwen3_5_moe", FORMAT, _NAMES, formats={"hf_fused": with_fused_experts(_NAMES, "mlp")}, untrained=("mtp.",)
)
SIZES = {
    "qwen3_5_35b_a3b": FORMAT.describe(
        vocab_size=248_320,
        num_layers=40,
        embed_dim=2048,
        intermediate_dim=1,  # of no layer: all have experts
        max_seq_len=262_144,
        num_heads=16,
        num_kv_heads=2,
        head_dim=256,
        mixer=DeltaNetMixer(num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128),
        mixer_layers=all_but_every(40, 4),
        rope_base=10_000_000.0,
        rope_dim=64,
        num_experts=256,
        experts_per_token=8,
        expert_dim=512,
        shared_expert_dim=512,
        router_balance=0.001,
        norm_eps=1e-6,
    )
}
BUILDERS = model_builders(__name__, "Qwen3.5 MoE", SPEC, SIZES)
qwen3_5_35b_a3b = BUILDERS["qwen3_5_35b_a3b"]
lora_qwen3_5_35b_a3b = BUILDERS["lora_qwen3_5_35b_a3b"]
qlora_qwen3_5_35b_a3b = BUILDERS["qlora_qwen3_5_35b_a3b"]

__all__ = ["SPEC", *BUILDERS]
