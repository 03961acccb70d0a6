"""Nemotron-H and Nemotron 3.

A layer is Mamba, attention, experts or a feed-forward. Feed-forwards have a squared ReLU; there is no RoPE.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torchtune.models._family import (
    HF_HALF,
    Description,
    Fields,
    HFFormat,
    Mamba2Mixer,
    ModelError,
    Row,
    experts,
    family,
    mixers,
    model_builders,
    renamed,
    require_silu,
    shared_expert,
    shown,
)

_KINDS = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
_NUMBERS = (  # their name, our name, default of transformers
    ("mamba_num_heads", "num_heads", 128),
    ("mamba_head_dim", "head_dim", 64),
    ("n_groups", "num_groups", 8),
    ("ssm_state_size", "state_dim", 128),
    ("conv_kernel", "conv_taps", 4),
    ("time_step_min", "dt_min", 0.001),
)
# Fields of MTP layers, of other implementations, and fields that do not affect the model in transformers.
_UNUSED = tuple(
    """num_nextn_predict_layers mtp_layers_block_type mtp_hybrid_override_pattern chunk_size expand norm_eps
    time_step_max time_step_floor time_step_limit mamba_proj_bias mamba_ssm_cache_dtype use_mamba_kernels
    num_logits_to_keep hidden_dropout rescale_prenorm_residual residual_in_fp32 n_shared_experts attention_bias
    moe_shared_expert_overlap sliding_window""".split()
)


def _layers(kinds: str) -> dict[str, tuple[int, ...]]:
    """Values of a description from a pattern with one letter per layer."""

    def those(letters: str) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(kinds) if kind in letters)

    return {
        "attnless_layers": those("E-"),
        "mlpless_layers": those("M*"),
        "mixer_layers": those("M"),
        "expertless_layers": those("-") if "E" in kinds else (),
        "unrotated_layers": tuple(range(len(kinds))),
    }


def _pattern(d: Description) -> str:
    kinds = ("M" if i in d.mixer_layers else "*" if i in d.mlpless_layers else None for i in range(d.num_layers))
    return "".join(kind or ("E" if i in d.expert_layers else "-") for i, kind in enumerate(kinds))


def _prepare(config: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the fields with kinds of layers by ``hybrid_override_pattern``, one letter per layer."""
    names = config.get("layers_block_type") or config.get("layer_types")
    letters = {name: letter for letter, name in _KINDS.items()} | {"mamba": "M", "attention": "*"}
    found = config.get("hybrid_override_pattern") or "ME*-"
    if names is not None:
        fits = isinstance(names, list) and all(isinstance(name, str) and name in letters for name in names)
        found = "".join(letters[name] for name in names) if fits else ""
    if not isinstance(found, str) or not found or set(found) - _KINDS.keys():
        raise ModelError(
            "config.json of NemotronHForCausalLM: layers_block_type (or hybrid_override_pattern) has "
            f"{shown(names or found)}, where a list of {', '.join(_KINDS.values())} is expected: download it again."
        )
    plain = {key: value for key, value in config.items() if key not in ("layers_block_type", "layer_types")}
    return {**plain, "num_hidden_layers": len(found), "hybrid_override_pattern": found}


def _read(fields: Fields) -> dict[str, Any]:
    kinds = fields.take("hybrid_override_pattern")
    require_silu(fields, "mamba_hidden_act")
    numbers = {ours: type(default)(fields.take(theirs, default)) for theirs, ours, default in _NUMBERS}
    return {
        **_layers(kinds),
        **_read_experts(fields, "E" in kinds),
        "mixer": Mamba2Mixer(**numbers) if "M" in kinds else None,
    }


_EXPERTS = (
    ("n_routed_experts", "num_experts", 8),
    ("num_experts_per_tok", "experts_per_token", 2),
    ("moe_intermediate_size", "expert_dim", 7688),
    ("moe_shared_expert_intermediate_size", "shared_expert_dim", 7688),
    ("moe_latent_size", "expert_latent_dim", 0),
    ("routed_scaling_factor", "router_scale", 1.0),
    ("n_group", "router_groups", 1),
    ("topk_group", "router_top_groups", 1),
    ("norm_topk_prob", "router_normalize", True),
)
_OF_ROUTER = {"router_scores": "sigmoid", "router_selection_bias": True, "router_sum_eps": 1e-20}


def _read_experts(fields: Fields, has_experts: bool) -> dict[str, Any]:
    numbers = {ours: type(default)(fields.take(theirs, default)) for theirs, ours, default in _EXPERTS}
    return {**numbers, **_OF_ROUTER} if has_experts else {}


def _write(d: Description) -> dict[str, Any]:
    pattern = _pattern(d)
    return {
        "hybrid_override_pattern": pattern,
        "layers_block_type": [_KINDS[kind] for kind in pattern],
        **({theirs: getattr(d.mixer, ours) for theirs, ours, _ in _NUMBERS} if d.mixer else {}),
        **({theirs: getattr(d, ours) for theirs, ours, _ in _EXPERTS} if d.num_experts else {}),
        "moe_latent_size": d.expert_latent_dim or None,
    }


FORMAT = HFFormat(
    "NemotronHForCausalLM",
    "nemotron_h",
    "half",
    activation=("mlp_hidden_act", "relu2"),
    ropes=("none",),
    eps_field="layer_norm_epsilon",
    fixed=(("mlp_gated", False), ("norm_rounds_last", True)),
    required_values=(("use_conv_bias", True), ("use_bias", False), ("mlp_bias", False)),
    unused=_UNUSED,
    read_more=_read,
    write_more=_write,
    prepare=_prepare,
    defaults=(
        ("num_attention_heads", 32),
        ("num_key_value_heads", 8),
        ("head_dim", 128),
        ("intermediate_size", 21_504),
        ("max_position_embeddings", 4096),
        ("layer_norm_epsilon", 1e-5),
    ),
)
_THEIRS, _OURS = "model.layers.{layer}.mlp.", "layers.{layer}.mlp."
_ROWS = (
    Row(f"{_THEIRS}gate.e_score_correction_bias", f"{_OURS}router.selection_bias", when="expert_layers"),
    Row(f"{_THEIRS}fc1_latent_proj.weight", f"{_OURS}latent_in.weight", when="expert_layers expert_latent_dim"),
    Row(f"{_THEIRS}fc2_latent_proj.weight", f"{_OURS}latent_out.weight", when="expert_layers expert_latent_dim"),
)
_HF = mixers(experts(HF_HALF, "mlp", "gate_proj", "up_proj", "down_proj"), Mamba2Mixer.names)
_NAMES = {
    "model.embed_tokens": "backbone.embeddings",
    "model.norm.": "backbone.norm_f.",
    "model.layers": "backbone.layers",
    "input_layernorm": "norm",
    "post_attention_layernorm": "norm",
    "mlp.gate_proj": "mixer.up_proj",
    "shared_experts.gate_proj": "shared_experts.up_proj",
    "self_attn.": "mixer.",
    "mlp.": "mixer.",
    "mamba.": "mixer.",
}
_RENAMED = renamed(shared_expert(_HF.extended(_ROWS), "mlp.shared_experts"), _NAMES)
SPEC = family(
    "nemotron_h",
    FORMAT,
    replace(_RENAMED, modules=(("backbone.", "model."),)),
    untrained=("mtp.",),
    not_in_peft=("mixer.out_proj",),
)

SIZES = {
    "nemotron3_nano_30b_a3b": FORMAT.describe(
        vocab_size=131_072,
        num_layers=52,
        embed_dim=2688,
        intermediate_dim=1856,
        max_seq_len=262_144,
        num_heads=32,
        num_kv_heads=2,
        head_dim=128,
        mixer=Mamba2Mixer(num_heads=64, head_dim=64, num_groups=8, dt_min=0.001),
        **_layers("MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"),
        num_experts=128,
        experts_per_token=6,
        expert_dim=1856,
        shared_expert_dim=3712,
        router_scale=2.5,
        router_normalize=True,
        **_OF_ROUTER,
    ),
}
BUILDERS = model_builders(__name__, "Nemotron 3 Nano", SPEC, SIZES)

__all__ = ["SPEC", *BUILDERS]
