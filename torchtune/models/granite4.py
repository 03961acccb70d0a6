"""Granite 4 and 4-H.

Attention in all layers, or Mamba in most of them (4-H); some models have experts.
"""

from dataclasses import replace
from typing import Any

from torchtune.models._family import (
    Description,
    Fields,
    HFFormat,
    Identity,
    Mamba2Mixer,
    Row,
    Split,
    family,
    hf_names,
    mixers,
    model_builders,
    read_mamba,
    renamed,
    with_fused_experts,
    write_mamba,
)
from torchtune.models.granite import read_multipliers, write_multipliers

# Present in files of models without Mamba layers, too.
_OF_MAMBA = "n_heads n_groups d_state d_head d_conv expand chunk_size conv_bias proj_bias".split()


def _read(fields: Fields) -> dict[str, Any]:
    layers = fields.take("num_hidden_layers")
    kinds = fields.layer_kinds(layers)
    mixed = tuple(i for i in range(layers) if kinds is None or kinds[i : i + 1] == ["linear_attention"])
    rotated = fields.choice("position_embedding_type", {"rope": True, "nope": False, "none": False}, "none")
    width, expand = fields.take("shared_intermediate_size", 1024), fields.take("mamba_expand", 2)
    return {
        **read_multipliers(fields),
        **_read_experts(fields, width),
        "intermediate_dim": width,
        "mixer": read_mamba(fields, expand * fields.take("hidden_size")) if mixed else None,
        "mixer_layers": mixed,
        "unrotated_layers": () if rotated else tuple(range(layers)),
    }


def _read_experts(fields: Fields, width: int) -> dict[str, Any]:
    chosen, balance = fields.take("num_experts_per_tok", 2), float(fields.take("router_aux_loss_coef", 0.001))
    if not (number := fields.take("num_local_experts", 8)):
        return {}
    return {
        "num_experts": number,
        "experts_per_token": chosen,
        "expert_dim": fields.take("intermediate_size"),
        "shared_expert_dim": width,
        "router_normalize": True,
        "router_balance": balance,
    }


def _write(d: Description) -> dict[str, Any]:
    kinds = ("attention", "mamba")
    experts = {"num_experts_per_tok": d.experts_per_token, "router_aux_loss_coef": d.router_balance}
    inner = d.mixer.num_heads * d.mixer.head_dim if d.mixer else 0
    return {
        **write_multipliers(d),
        "intermediate_size": d.expert_dim or d.intermediate_dim,
        "shared_intermediate_size": d.intermediate_dim,
        "position_embedding_type": None if d.unrotated_layers else "rope",
        "layer_types": [kinds[layer in d.mixer_layers] for layer in range(d.num_layers)],
        "num_local_experts": d.num_experts,
        **(experts if d.num_experts else {}),
        **({**write_mamba(d.mixer), "mamba_expand": inner // d.embed_dim} if d.mixer else {"mamba_n_heads": 1}),
    }


FORMAT = HFFormat(
    "GraniteMoeHybridForCausalLM",
    "granitemoehybrid",
    "half",
    biases="attention_bias",
    mixer_kind="linear_attention",
    extra_fields=(("embedding_multiplier", "embed_scale", 1.0), ("residual_multiplier", "residual_scale", 1.0)),
    unused=("time_step_limit", *(f"mamba_{name}" for name in _OF_MAMBA)),
    read_more=_read,
    write_more=_write,
    defaults=(("max_position_embeddings", 2048), ("intermediate_size", 11_008)),
)
_NAMES = {
    "mlp.gate_up_proj": "shared_mlp.input_linear",
    "mlp.down_proj": "shared_mlp.output_linear",
    "experts.gate_up_proj": "input_linear.weight",
    "experts.down_proj": "output_linear.weight",
}
_LAYER, _SHARED = "model.layers.{layer}.", "layers.{layer}.mlp.shared_expert."
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
    mixer_layers=tuple(i for i in range(40) if i % 10 != 5),
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
SIZES = {
    "granite4_micro": _MICRO,
    "granite4_h_micro": _H_MICRO,
    "granite4_h_tiny": _H_TINY,
    "granite4_h_small": _H_SMALL,
}
BUILDERS = {
    name: builder
    for size, row in SIZES.items()
    for name, builder in model_builders(
        __name__, "Granite 4-H" if row.mixer else "Granite 4", SPEC, {size: row}
    ).items()
}

__all__ = ["SPEC", *BUILDERS]
