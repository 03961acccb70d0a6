"""Mistral Small 4, a mixture of experts with latent attention.

DeepSeek V3's attention with queries that are scaled by their position; softmax routers, a shared expert, and YaRN.
"""

from typing import Any

from torchtune.models._builders import model_builders
from torchtune.models._description import Description, YarnRopeScaling
from torchtune.models._hf_config import HFFormat
from torchtune.models._hf_fields import Fields
from torchtune.models._hf_layers import read_experts, read_latents, router_fields, write_experts, write_latents
from torchtune.models._hf_rope import write_growth, write_scaling
from torchtune.models._spec import family
from torchtune.models._weight_names import HF_HALF, experts, latent_attention, shared_expert, with_fused_experts

_YARN = YarnRopeScaling(factor=128.0, original_max_seq_len=8192, mscale=1.0, mscale_all_dim=1.0)
# What transformers assumes without rope_parameters.
_DEFAULT_ROPE = {**(write_scaling(_YARN) or {}), "rope_theta": 1e4, "llama_4_scaling_beta": 0.1}


def _read(fields: Fields) -> dict[str, Any]:
    latents = read_latents(
        fields, kv_latent_dim=256, q_latent_dim=1024, unrotated_dim=64, value_dim=128, whole_head=True
    )
    return {**read_experts(fields, num_experts=128, expert_dim=2048, num_dense_layers=0), **latents}


def _write(d: Description) -> dict[str, Any]:
    return {**write_experts(d), **write_latents(d, whole_head=True), **write_growth(d)}


_FORMAT = HFFormat(
    "Mistral4ForCausalLM",
    "mistral4",
    "interleaved",
    biases="attention_bias",
    ropes=("partial", "growth"),
    extra_fields=router_fields(experts_per_token=4),
    read_more=_read,
    write_more=_write,
    defaults={"max_position_embeddings": 1_048_576, "rope_parameters": _DEFAULT_ROPE},
)
_EXPERTS = experts(latent_attention(HF_HALF), "mlp", "gate_proj", "up_proj", "down_proj")
SPEC = family("mistral4", _FORMAT, shared_expert(with_fused_experts(_EXPERTS, "mlp"), "mlp.shared_experts"))

SIZES = {
    "mistral4_119b": _FORMAT.describe(
        vocab_size=131_072,
        num_layers=36,
        embed_dim=4096,
        intermediate_dim=12_288,
        max_seq_len=1_048_576,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        kv_latent_dim=256,
        q_latent_dim=1024,
        value_dim=128,
        rope_dim=64,
        rope_scaling=_YARN,
        query_growth=0.1,
        query_growth_span=8192,
        num_experts=128,
        experts_per_token=4,
        expert_dim=2048,
        router_normalize=True,
        shared_expert_dim=2048,
        norm_eps=1e-6,
    ),
}
BUILDERS = model_builders(__name__, "Mistral 4", SPEC, SIZES)
mistral4_119b = BUILDERS["mistral4_119b"]
lora_mistral4_119b = BUILDERS["lora_mistral4_119b"]
qlora_mistral4_119b = BUILDERS["qlora_mistral4_119b"]

__all__ = ["SPEC", *BUILDERS]
