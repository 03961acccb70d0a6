"""GLM-4.5, 4.6 and 4.7, mixtures of experts.

Sigmoid routers with a selection bias, a shared expert, and dense first layers, as in DeepSeek V3, over attention with
partial RoPE (https://arxiv.org/abs/2508.06471).
"""

from dataclasses import replace
from typing import Any

from torchtune.models._builders import model_builders
from torchtune.models._description import Description
from torchtune.models._hf_config import HFFormat
from torchtune.models._hf_fields import Fields
from torchtune.models._hf_layers import read_experts, router_fields, write_experts
from torchtune.models._spec import family
from torchtune.models._weight_names import HF_HALF, experts, shared_expert


def _read(fields: Fields) -> dict[str, Any]:
    norm = "before_rope" if fields.take("use_qk_norm", False) else "none"
    return {**read_experts(fields, num_experts=128, expert_dim=1408, num_dense_layers=1), "qk_norm": norm}


def _write(d: Description) -> dict[str, Any]:
    return {**write_experts(d), "use_qk_norm": d.has_qk_norm}


_FORMAT = HFFormat(
    "Glm4MoeForCausalLM",
    "glm4_moe",
    "half",
    biases="attention_bias",
    output_bias=False,
    ropes=("partial",),
    fixed={"router_scores": "sigmoid", "router_selection_bias": True},
    extra_fields=router_fields(experts_per_token=8),
    read_more=_read,
    write_more=_write,
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
    },
)
_EXPERTS = experts(HF_HALF, "mlp", "gate_proj", "up_proj", "down_proj", "gate.e_score_correction_bias")
SPEC = family("glm4_moe", _FORMAT, shared_expert(_EXPERTS, "mlp.shared_experts"), untrained_layers="eh_proj.weight")

_AIR = _FORMAT.describe(
    vocab_size=151_552,
    num_layers=46,
    embed_dim=4096,
    intermediate_dim=10_944,
    max_seq_len=131_072,
    num_heads=96,
    num_kv_heads=8,
    head_dim=128,
    q_bias=True,
    k_bias=True,
    v_bias=True,
    rope_base=1_000_000.0,
    rope_dim=64,
    num_experts=128,
    experts_per_token=8,
    expert_dim=1408,
    expertless_layers=(0,),
    router_normalize=True,
    shared_expert_dim=1408,
    norm_eps=1e-5,
)
SIZES = {
    "glm4_5_air": _AIR,
    "glm4_5": replace(
        _AIR,
        num_layers=92,
        embed_dim=5120,
        intermediate_dim=12_288,
        qk_norm="before_rope",
        num_experts=160,
        expert_dim=1536,
        expertless_layers=(0, 1, 2),
        router_scale=2.5,
        shared_expert_dim=1536,
    ),
}
BUILDERS = model_builders(__name__, "GLM", SPEC, SIZES)
glm4_5_air = BUILDERS["glm4_5_air"]
lora_glm4_5_air = BUILDERS["lora_glm4_5_air"]
qlora_glm4_5_air = BUILDERS["qlora_glm4_5_air"]
glm4_5 = BUILDERS["glm4_5"]
lora_glm4_5 = BUILDERS["lora_glm4_5"]
qlora_glm4_5 = BUILDERS["qlora_glm4_5"]

__all__ = ["SPEC", *BUILDERS]
