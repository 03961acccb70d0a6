"""Granite 4 and 4-H.

Attention in all layers, or Mamba 2 in nine of ten and no RoPE (4-H); some models have experts. The constant factors are
those of Granite 3.
"""

from dataclasses import replace
from typing import Any

from torchtune.models._builders import model_builders
from torchtune.models._description import Description
from torchtune.models._hf_config import HFFormat
from torchtune.models._hf_fields import Fields, layers_of_type, write_layer_types
from torchtune.models._hf_layers import read_mamba, write_mamba
from torchtune.models._mixers import Mamba2Mixer
from torchtune.models._spec import family
from torchtune.models._weight_map import Identity, Row
from torchtune.models._weight_names import hf_names, mixers, renamed, with_fused_experts
from torchtune.models._weight_ops import Split
from torchtune.models.granite import read_multipliers, write_multipliers


def _read(fields: Fields) -> dict[str, Any]:
    num_layers = fields.take("num_hidden_layers")
    layer_types = fields.layer_types(num_layers)
    mixer_layers = tuple(range(num_layers))  # without layer_types, as in transformers
    if layer_types is not None:
        mixer_layers = layers_of_type(layer_types[:num_layers], "linear_attention")
    has_rope = fields.choice("position_embedding_type", {"rope": True, "nope": False, "none": False}, "none")
    shared_dim = fields.take("shared_intermediate_size", 1024)
    expand = fields.take("mamba_expand", 2)
    return {
        **read_multipliers(fields),
        **_read_experts(fields, shared_dim),
        # The shared expert is the feed-forward of a dense model; intermediate_size is the width of an expert.
        "intermediate_dim": shared_dim,
        "mixer": read_mamba(fields, expand * fields.take("hidden_size")) if mixer_layers else None,
        "mixer_layers": mixer_layers,
        "unrotated_layers": () if has_rope else tuple(range(num_layers)),
    }


def _read_experts(fields: Fields, shared_dim: int) -> dict[str, Any]:
    """Read the experts; no values for a dense model."""
    experts_per_token = fields.take("num_experts_per_tok", 2)
    balance = float(fields.take("router_aux_loss_coef", 0.001))
    num_experts = fields.take("num_local_experts", 8)
    if not num_experts:  # only the shared expert is left, as the feed-forward of a dense model
        return {}
    return {
        "num_experts": num_experts,
        "experts_per_token": experts_per_token,
        "expert_dim": fields.take("intermediate_size"),
        "shared_expert_dim": shared_dim,
        "router_normalize": True,
        "router_balance": balance,
    }


def _write(d: Description) -> dict[str, Any]:
    config = {
        **write_multipliers(d),
        "intermediate_size": d.expert_dim or d.intermediate_dim,  # no effect without experts
        "shared_intermediate_size": d.intermediate_dim,
        "position_embedding_type": None if d.unrotated_layers else "rope",
        "layer_types": write_layer_types(d.num_layers, d.mixer_layers, "mamba", other="attention"),
        "num_local_experts": d.num_experts,
    }
    if d.num_experts:
        config["num_experts_per_tok"] = d.experts_per_token
        config["router_aux_loss_coef"] = d.router_balance
    if d.mixer is None:
        config["mamba_n_heads"] = 1  # transformers requires that it divides the width
    else:
        config |= write_mamba(d.mixer)
        config["mamba_expand"] = d.mixer.num_heads * d.mixer.head_dim // d.embed_dim
    return config


FORMAT = HFFormat(
    "GraniteMoeHybridForCausalLM",
    "granitemoehybrid",
    "half",
    biases="attention_bias",
    mixer_layer_type="linear_attention",
    extra_fields=(("embedding_multiplier", "embed_scale", 1.0), ("residual_multiplier", "residual_scale", 1.0)),
    required_values={"normalization_function": "rmsnorm"},
    # The initialization of weights, and fields of Mamba, which files of models without Mamba layers have, too.
    unused=(
        "init_method",
        "time_step_limit",
        "mamba_n_heads",
        "mamba_n_groups",
        "mamba_d_state",
        "mamba_d_head",
        "mamba_d_conv",
        "mamba_expand",
        "mamba_chunk_size",
        "mamba_conv_bias",
        "mamba_proj_bias",
    ),
    read_more=_read,
    write_more=_write,
    defaults={"max_position_embeddings": 2048, "intermediate_size": 11_008},
)
_NAMES = {
    "mlp.gate_up_proj": "shared_mlp.input_linear",
    "mlp.down_proj": "shared_mlp.output_linear",
    "experts.gate_up_proj": "input_linear.weight",
    "experts.down_proj": "output_linear.weight",
}
_LAYER = "model.layers.{layer}."
_SHARED = "layers.{layer}.mlp.shared_expert."
_ROWS = (
    Row(f"{_LAYER}block_sparse_moe.router.layer.weight", "layers.{layer}.mlp.router.gate.weight", when="expert_layers"),
    Row(
        f"{_LAYER}shared_mlp.input_linear.weight",
        (f"{_SHARED}w1.weight", f"{_SHARED}w3.weight"),
        Split(("shared_expert_dim",) * 2),
        "expert_layers shared_expert_dim",
    ),
    Row(f"{_LAYER}shared_mlp.output_linear.weight", f"{_SHARED}w2.weight", when="expert_layers shared_expert_dim"),
)
_HF = renamed(with_fused_experts(hf_names(Identity(), fused=("gate_up",)), "block_sparse_moe"), _NAMES)
SPEC = family("granite4", FORMAT, mixers(_HF.extended(_ROWS), Mamba2Mixer.names))

_MICRO = FORMAT.describe(
    vocab_size=100_352,
    num_layers=40,
    embed_dim=2560,
    intermediate_dim=8192,
    max_seq_len=131_072,
    num_heads=40,
    num_kv_heads=8,
    rope_base=10_000_000.0,
    embed_scale=12.0,
    residual_scale=0.22,
    hidden_scale=1 / 10,
    attn_scale=1 / 64,
    tie_word_embeddings=True,
)
_H_MICRO = replace(
    _MICRO,
    embed_dim=2048,
    num_heads=32,
    mixer=Mamba2Mixer(num_heads=64, head_dim=64),
    mixer_layers=tuple(layer for layer in range(40) if layer % 10 != 5),
    rope_base=10_000.0,
    unrotated_layers=tuple(range(40)),
    hidden_scale=1 / 8,
)
_H_TINY = replace(
    _H_MICRO,
    embed_dim=1536,
    intermediate_dim=1024,
    num_heads=12,
    num_kv_heads=4,
    head_dim=128,
    rope_dim=128,
    mixer=Mamba2Mixer(num_heads=48, head_dim=64),
    num_experts=64,
    experts_per_token=6,
    expert_dim=512,
    shared_expert_dim=1024,
    router_normalize=True,
    router_balance=0.001,
    hidden_scale=1 / 6,
    attn_scale=1 / 128,
)
_H_SMALL = replace(
    _H_TINY,
    embed_dim=4096,
    intermediate_dim=1536,
    num_heads=32,
    num_kv_heads=8,
    mixer=Mamba2Mixer(num_heads=128, head_dim=64),
    num_experts=72,
    experts_per_token=10,
    expert_dim=768,
    shared_expert_dim=1536,
    hidden_scale=1 / 16,
)
_H_SIZES = {
    "granite4_h_micro": _H_MICRO,
    "granite4_h_tiny": _H_TINY,
    "granite4_h_small": _H_SMALL,
}
SIZES = {"granite4_micro": _MICRO, **_H_SIZES}
BUILDERS = {
    **model_builders(__name__, "Granite 4", SPEC, {"granite4_micro": _MICRO}),
    **model_builders(__name__, "Granite 4-H", SPEC, _H_SIZES),
}
granite4_micro = BUILDERS["granite4_micro"]
lora_granite4_micro = BUILDERS["lora_granite4_micro"]
qlora_granite4_micro = BUILDERS["qlora_granite4_micro"]
granite4_h_micro = BUILDERS["granite4_h_micro"]
lora_granite4_h_micro = BUILDERS["lora_granite4_h_micro"]
qlora_granite4_h_micro = BUILDERS["qlora_granite4_h_micro"]
granite4_h_tiny = BUILDERS["granite4_h_tiny"]
lora_granite4_h_tiny = BUILDERS["lora_granite4_h_tiny"]
qlora_granite4_h_tiny = BUILDERS["qlora_granite4_h_tiny"]
granite4_h_small = BUILDERS["granite4_h_small"]
lora_granite4_h_small = BUILDERS["lora_granite4_h_small"]
qlora_granite4_h_small = BUILDERS["qlora_granite4_h_small"]

__all__ = ["SPEC", *BUILDERS]
