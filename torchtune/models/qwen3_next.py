"""Qwen3-Next, mixtures of experts with linear attention.

Linear attention in three of four layers, 512 experts and a gated shared expert in every layer. The mixers are those of
Qwen 3.5, with fused projections in files.
"""

from typing import Any

from torchtune.models._builders import model_builders
from torchtune.models._description import Description
from torchtune.models._hf_config import HFFormat
from torchtune.models._hf_fields import Fields, all_but_every
from torchtune.models._hf_layers import (
    FUSED_DELTA_NET,
    read_delta_net,
    read_qwen_experts,
    write_delta_net,
    write_qwen_experts,
)
from torchtune.models._mixers import DeltaNetMixer
from torchtune.models._spec import family
from torchtune.models._weight_names import HF_HALF, experts, mixers, shared_expert


def _read(fields: Fields) -> dict[str, Any]:
    return {**read_qwen_experts(fields, num_experts=512), **read_delta_net(fields, fused=True)}


def _write(d: Description) -> dict[str, Any]:
    return {**write_qwen_experts(d), **write_delta_net(d)}


_FORMAT = HFFormat(
    "Qwen3NextForCausalLM",
    "qwen3_next",
    "half",
    biases="attention_bias",
    qk_norm="before_rope",
    mixer_layer_type="linear_attention",
    ropes=("partial",),
    fixed={"attn_gate": True, "norm_unit_offset": True, "shared_expert_gate": True},
    extra_fields=(
        ("num_experts_per_tok", "experts_per_token", 10),
        ("moe_intermediate_size", "expert_dim", 512),
        ("shared_expert_intermediate_size", "shared_expert_dim", 512),
        ("norm_topk_prob", "router_normalize", True),
        ("router_aux_loss_coef", "router_balance", 0.001),
    ),
    read_more=_read,
    write_more=_write,
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32_768,
        "partial_rotary_factor": 0.25,
    },
)
_NAMES = experts(mixers(HF_HALF, FUSED_DELTA_NET), "mlp", "gate_proj", "up_proj", "down_proj")
SPEC = family(
    "qwen3_next", _FORMAT, shared_expert(_NAMES, "mlp.shared_expert", "mlp.shared_expert_gate"), untrained=("mtp.",)
)
SIZES = {
    "qwen3_next_80b_a3b": _FORMAT.describe(
        vocab_size=151_936,
        num_layers=48,
        embed_dim=2048,
        intermediate_dim=5120,
        max_seq_len=262_144,
        num_heads=16,
        num_kv_heads=2,
        head_dim=256,
        mixer=DeltaNetMixer(num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128, fused=True),
        mixer_layers=all_but_every(48, 4),
        rope_base=10_000_000.0,
        rope_dim=64,
        num_experts=512,
        experts_per_token=10,
        expert_dim=512,
        router_normalize=True,
        shared_expert_dim=512,
        router_balance=0.001,
        norm_eps=1e-6,
    )
}
BUILDERS = model_builders(__name__, "Qwen3-Next", SPEC, SIZES)
qwen3_next_80b_a3b = BUILDERS["qwen3_next_80b_a3b"]
lora_qwen3_next_80b_a3b = BUILDERS["lora_qwen3_next_80b_a3b"]
qlora_qwen3_next_80b_a3b = BUILDERS["qlora_qwen3_next_80b_a3b"]

__all__ = ["SPEC", *BUILDERS]
