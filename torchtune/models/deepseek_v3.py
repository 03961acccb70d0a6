"""DeepSeek V3 and models of its architecture, mixtures of experts with latent attention.

Sigmoid routers have a selection bias and groups of experts; every layer with experts has a shared expert
(https://arxiv.org/abs/2412.19437). Moonlight has this architecture, too (https://arxiv.org/abs/2502.16982).
"""

from dataclasses import replace
from typing import Any

from torchtune.models._builders import model_builders
from torchtune.models._description import Description, YarnRopeScaling
from torchtune.models._hf_config import HFFormat
from torchtune.models._hf_fields import Fields
from torchtune.models._hf_layers import read_experts, read_latents, router_fields, write_experts, write_latents
from torchtune.models._spec import family
from torchtune.models._weight_names import HF_HALF, experts, latent_attention, shared_expert


def _read(fields: Fields) -> dict[str, Any]:
    latents = read_latents(
        fields, kv_latent_dim=512, q_latent_dim=1536, unrotated_dim=128, value_dim=128, whole_head=False
    )
    return {**read_experts(fields, num_experts=256, expert_dim=2048, num_dense_layers=3), **latents}


def _write(d: Description) -> dict[str, Any]:
    return {**write_experts(d), **write_latents(d, whole_head=False)}


FORMAT = HFFormat(
    "DeepseekV3ForCausalLM",
    "deepseek_v3",
    "interleaved",
    biases="attention_bias",
    fixed={"router_scores": "sigmoid", "router_selection_bias": True},
    extra_fields=router_fields(experts_per_token=8, scale=2.5, groups=8, top=4),
    read_more=_read,
    write_more=_write,
    defaults={"max_position_embeddings": 4096},
)
_EXPERTS = experts(
    latent_attention(HF_HALF), "mlp", "gate_proj", "up_proj", "down_proj", bias="gate.e_score_correction_bias"
)
WEIGHTS = shared_expert(_EXPERTS, "mlp.shared_experts")
# Only layers of multi-token prediction, which are not trained, have this projection.
SPEC = family("deepseek_v3", FORMAT, WEIGHTS, untrained_layers="eh_proj.weight")

_671B = FORMAT.describe(
    vocab_size=129_280,
    num_layers=61,
    embed_dim=7168,
    intermediate_dim=18_432,
    max_seq_len=163_840,
    num_heads=128,
    num_kv_heads=128,
    head_dim=192,  # of queries and keys: 128 channels without RoPE, and rope_dim
    kv_latent_dim=512,
    q_latent_dim=1536,
    value_dim=128,
    rope_dim=64,
    rope_scaling=YarnRopeScaling(factor=40.0, original_max_seq_len=4096, mscale=1.0, mscale_all_dim=1.0),
    num_experts=256,
    experts_per_token=8,
    expert_dim=2048,
    expertless_layers=(0, 1, 2),
    router_normalize=True,
    router_scale=2.5,
    router_groups=8,
    router_top_groups=4,
    shared_expert_dim=2048,
    norm_eps=1e-6,
)
SIZES = {
    "deepseek_v3": _671B,
    "moonlight_16b_a3b": replace(
        _671B,
        vocab_size=163_840,
        num_layers=27,
        embed_dim=2048,
        intermediate_dim=11_264,
        max_seq_len=8192,
        num_heads=16,
        num_kv_heads=16,
        q_latent_dim=0,
        rope_base=50_000.0,
        rope_scaling=None,
        num_experts=64,
        experts_per_token=6,
        expert_dim=1408,
        expertless_layers=(0,),
        router_scale=2.446,
        router_groups=1,
        router_top_groups=1,
        shared_expert_dim=2816,
        norm_eps=1e-5,
    ),
}
BUILDERS = model_builders(__name__, "DeepSeek", SPEC, SIZES)
deepseek_v3 = BUILDERS["deepseek_v3"]
lora_deepseek_v3 = BUILDERS["lora_deepseek_v3"]
qlora_deepseek_v3 = BUILDERS["qlora_deepseek_v3"]
moonlight_16b_a3b = BUILDERS["moonlight_16b_a3b"]
lora_moonlight_16b_a3b = BUILDERS["lora_moonlight_16b_a3b"]
qlora_moonlight_16b_a3b = BUILDERS["qlora_moonlight_16b_a3b"]

__all__ = ["SPEC", *BUILDERS]
