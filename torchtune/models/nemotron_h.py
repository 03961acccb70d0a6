"""Nemotron-H and Nemotron 3.

A layer is Mamba 2, attention, experts or a feed-forward. Feed-forwards have a squared ReLU; there is no RoPE
(https://arxiv.org/abs/2504.03624).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torchtune.models._builders import model_builders
from torchtune.models._description import Description, ModelError
from torchtune.models._hf_config import HFFormat
from torchtune.models._hf_fields import Fields, format_value
from torchtune.models._hf_layers import require_silu
from torchtune.models._mixers import Mamba2Mixer
from torchtune.models._spec import family
from torchtune.models._weight_map import Row
from torchtune.models._weight_names import HF_HALF, experts, mixers, renamed, shared_expert

# Letter in hybrid_override_pattern -> kind of layer.
_KINDS = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
# Names of kinds in layers_block_type -> letter.
_LETTERS = {
    "linear_attention": "M",
    "mamba": "M",
    "full_attention": "*",
    "attention": "*",
    "moe": "E",
    "mlp": "-",
}
# Sizes: (name in config.json, name in the mixer or the description, default of transformers).
_MAMBA_SIZES = (
    ("mamba_num_heads", "num_heads", 128),
    ("mamba_head_dim", "head_dim", 64),
    ("n_groups", "num_groups", 8),
    ("ssm_state_size", "state_dim", 128),
    ("conv_kernel", "conv_taps", 4),
    ("time_step_min", "dt_min", 0.001),
)
_EXPERT_SIZES = (
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
# The eps keeps the sum of the selected scores from being zero.
_ROUTER = {"router_scores": "sigmoid", "router_selection_bias": True, "router_sum_eps": 1e-20}
# Fields of MTP layers, of other implementations, and fields that do not affect the model in transformers.
_UNUSED = tuple(
    """num_nextn_predict_layers mtp_layers_block_type mtp_hybrid_override_pattern chunk_size expand norm_eps
    time_step_max time_step_floor time_step_limit mamba_proj_bias mamba_ssm_cache_dtype use_mamba_kernels
    num_logits_to_keep hidden_dropout rescale_prenorm_residual residual_in_fp32 n_shared_experts attention_bias
    moe_shared_expert_overlap sliding_window""".split()
)


def _layers(pattern: str) -> dict[str, tuple[int, ...]]:
    """Return the layers of each kind, as values of a description, from a pattern with one letter per layer."""

    def layers_of(letters: str) -> tuple[int, ...]:
        return tuple(layer for layer, letter in enumerate(pattern) if letter in letters)

    return {
        "attnless_layers": layers_of("E-"),
        "mlpless_layers": layers_of("M*"),
        "mixer_layers": layers_of("M"),
        "expertless_layers": layers_of("-") if "E" in pattern else (),
        "unrotated_layers": tuple(range(len(pattern))),
    }


def _pattern(d: Description) -> str:
    """Return the pattern of a description; the inverse of :func:`_layers`."""
    letters = []
    for layer in range(d.num_layers):
        if layer in d.mixer_layers:
            letters.append("M")
        elif layer in d.mlpless_layers:
            letters.append("*")
        elif layer in d.expert_layers:
            letters.append("E")
        else:
            letters.append("-")
    return "".join(letters)


def _prepare(config: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the fields with kinds of layers by ``hybrid_override_pattern``, one letter per layer."""
    config = dict(config)
    block_types = config.pop("layers_block_type", None)
    layer_types = config.pop("layer_types", None)
    kinds = block_types or layer_types
    pattern = config.get("hybrid_override_pattern") or "ME*-"  # the default of transformers
    if kinds is not None:  # has precedence over the pattern, as in transformers
        is_known = isinstance(kinds, list) and all(isinstance(kind, str) and kind in _LETTERS for kind in kinds)
        pattern = ""  # refused below
        if is_known:
            pattern = "".join(_LETTERS[kind] for kind in kinds)
    if not isinstance(pattern, str) or not pattern or set(pattern) - _KINDS.keys():
        raise ModelError(
            "config.json of NemotronHForCausalLM: layers_block_type (or hybrid_override_pattern) has "
            f"{format_value(kinds or pattern)}, where a list of {', '.join(_KINDS.values())} is expected: download it "
            "again."
        )
    return {**config, "num_hidden_layers": len(pattern), "hybrid_override_pattern": pattern}


def _read(fields: Fields) -> dict[str, Any]:
    pattern = fields.take("hybrid_override_pattern")
    require_silu(fields, "mamba_hidden_act")
    mamba_sizes = _read_sizes(fields, _MAMBA_SIZES)
    expert_sizes = _read_sizes(fields, _EXPERT_SIZES)
    values: dict[str, Any] = {**_layers(pattern), "mixer": None}
    if "M" in pattern:
        values["mixer"] = Mamba2Mixer(**mamba_sizes)
    if "E" in pattern:
        values |= {**expert_sizes, **_ROUTER}
    return values


def _read_sizes(fields: Fields, sizes: tuple[tuple[str, str, Any], ...]) -> dict[str, Any]:
    return {attribute: type(default)(fields.take(name, default)) for name, attribute, default in sizes}


def _write(d: Description) -> dict[str, Any]:
    pattern = _pattern(d)
    config: dict[str, Any] = {
        "hybrid_override_pattern": pattern,
        "layers_block_type": [_KINDS[letter] for letter in pattern],
    }
    if d.mixer is not None:
        config |= {name: getattr(d.mixer, field) for name, field, _ in _MAMBA_SIZES}
    if d.num_experts:
        config |= {name: getattr(d, field) for name, field, _ in _EXPERT_SIZES}
    config["moe_latent_size"] = d.expert_latent_dim or None
    return config


FORMAT = HFFormat(
    "NemotronHForCausalLM",
    "nemotron_h",
    "half",
    activation=("mlp_hidden_act", "relu2"),
    ropes=("none",),
    eps_field="layer_norm_epsilon",
    fixed={"mlp_gated": False, "norm_rounds_last": True},
    required_values={"use_conv_bias": True, "use_bias": False, "mlp_bias": False},
    unused=_UNUSED,
    read_more=_read,
    write_more=_write,
    prepare=_prepare,
    defaults={
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 21_504,
        "max_position_embeddings": 4096,
        "layer_norm_epsilon": 1e-5,
    },
)
_HF_MLP = "model.layers.{layer}.mlp."
_TUNE_MLP = "layers.{layer}.mlp."
_ROWS = (
    Row(f"{_HF_MLP}gate.e_score_correction_bias", f"{_TUNE_MLP}router.selection_bias", when="expert_layers"),
    Row(f"{_HF_MLP}fc1_latent_proj.weight", f"{_TUNE_MLP}latent_in.weight", when="expert_layers expert_latent_dim"),
    Row(f"{_HF_MLP}fc2_latent_proj.weight", f"{_TUNE_MLP}latent_out.weight", when="expert_layers expert_latent_dim"),
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
        **_ROUTER,
    ),
}
BUILDERS = model_builders(__name__, "Nemotron 3 Nano", SPEC, SIZES)
nemotron3_nano_30b_a3b = BUILDERS["nemotron3_nano_30b_a3b"]
lora_nemotron3_nano_30b_a3b = BUILDERS["lora_nemotron3_nano_30b_a3b"]
qlora_nemotron3_nano_30b_a3b = BUILDERS["qlora_nemotron3_nano_30b_a3b"]

__all__ = ["SPEC", *BUILDERS]
