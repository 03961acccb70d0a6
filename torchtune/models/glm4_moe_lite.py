"""GLM-4.7-Flash, a mixture of experts with latent attention.

DeepSeek V3's layers, with values as wide as keys.
"""

from typing import Any

from torchtune.models._builders import model_builders
from torchtune.models._description import Description
from torchtune.models._hf_config import HFFormat
from torchtune.models._hf_fields import Fields, layers_of_type, write_layer_types
from torchtune.models._hf_layers import read_experts, read_latents, router_fields, write_experts, write_latents
from torchtune.models._spec import family
from torchtune.models.deepseek_v3 import WEIGHTS


def _read(fields: Fields) -> dict[str, Any]:
    values = read_experts(fields, num_experts=64, expert_dim=1536, num_dense_layers=1)
    values |= read_latents(
        fields, kv_latent_dim=512, q_latent_dim=768, unrotated_dim=192, value_dim=256, whole_head=False
    )
    num_layers = fields.take("num_hidden_layers")
    layer_types = fields.list_of("mlp_layer_types", num_layers, str)
    if layer_types is None:
        if fields.take("first_k_dense_replace", 1) != 1:  # transformers does not read it
            raise fields.refusal("first_k_dense_replace", fields.peek("first_k_dense_replace"))
        return values
    if len(layer_types) < num_layers or set(layer_types) - {"sparse", "dense"}:
        raise fields.refusal("mlp_layer_types", layer_types)
    values["expertless_layers"] = layers_of_type(layer_types[:num_layers], "dense")
    return values


def _write(d: Description) -> dict[str, Any]:
    layer_types = write_layer_types(d.num_layers, d.expertless_layers, "dense", other="sparse")
    return {**write_experts(d), **write_latents(d, whole_head=False), "mlp_layer_types": layer_types}


_FORMAT = HFFormat(
    "Glm4MoeLiteForCausalLM",
    "glm4_moe_lite",
    "interleaved",
    biases="attention_bias",
    fixed={"router_scores": "sigmoid", "router_selection_bias": True},
    extra_fields=router_fields(experts_per_token=4, scale=1.8),
    read_more=_read,
    write_more=_write,
    defaults={"max_position_embeddings": 202_752, "rms_norm_eps": 1e-5},
)
SPEC = family("glm4_moe_lite", _FORMAT, WEIGHTS, untrained_layers="eh_proj.weight")

SIZES = {
    "glm4_7_flash": _FORMAT.describe(
        vocab_size=154_880,
        num_layers=47,
        embed_dim=2048,
        intermediate_dim=10_240,
        max_seq_len=202_752,
        num_heads=20,
        num_kv_heads=20,
        head_dim=256,
        kv_latent_dim=512,
        q_latent_dim=768,
        value_dim=256,
        rope_dim=64,
        rope_base=1_000_000.0,
        num_experts=64,
        experts_per_token=4,
        expert_dim=1536,
        expertless_layers=(0,),
        router_normalize=True,
        router_scale=1.8,
        shared_expert_dim=1536,
        norm_eps=1e-5,
    ),
}
BUILDERS = model_builders(__name__, "GLM", SPEC, SIZES)
glm4_7_flash = BUILDERS["glm4_7_flash"]
lora_glm4_7_flash = BUILDERS["lora_glm4_7_flash"]
qlora_glm4_7_flash = BUILDERS["qlora_glm4_7_flash"]

__all__ = ["SPEC", *BUILDERS]
