"""Gemma 4, the text models.

Models are dense, have experts in parallel to the feed-forward, or have embeddings per layer.
"""

from dataclasses import replace
from typing import Any

from torchtune.models._family import (
    Description,
    Fields,
    FusedExperts,
    HFFormat,
    Identity,
    ModelError,
    ProportionalRopeScaling,
    Row,
    family,
    hf_names,
    model_builders,
    shown,
)
from torchtune.models.gemma2 import NORMS

_ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}


_PER_LAYER = ("head_dim", "num_key_value_heads")


def read_gemma4(fields: Fields) -> dict[str, Any]:
    """Read the layers of a ``config.json`` of Gemma 4 as values of a description."""
    if fields.take("use_bidirectional_attention", None) not in (None, False, "vision"):  # "vision": for images only
        raise fields.refusal("use_bidirectional_attention", fields.peek("use_bidirectional_attention"))
    num_layers, shared = fields.take("num_hidden_layers"), fields.take("num_kv_shared_layers", 0)
    kinds = fields.list_of("layer_types", num_layers, str) or []
    windowed = [kinds[i] == "sliding_attention" if kinds else bool((i + 1) % 6) for i in range(num_layers)][:-1]
    layers = tuple(i for i, is_windowed in enumerate(windowed) if is_windowed)  # the last layer has none in any case
    wide = bool(fields.take("use_double_wide_mlp", False) and shared)
    embedded = fields.take("hidden_size_per_layer_input", 256)
    embedded_vocab = fields.take("vocab_size_per_layer_input", 262_144)
    values = {
        "window_layers": layers,
        "embed_scale": fields.take("hidden_size") ** 0.5,
        "logit_softcap": fields.take("final_logit_softcapping", None),
        "full_keys_as_values": bool(fields.take("attention_k_eq_v", False)),
        "shared_kv_layers": shared,
        "shared_kv_intermediate_dim": 2 * fields.take("intermediate_size") if wide else 0,
        "layer_embed_dim": embedded,
        "layer_embed_vocab": embedded_vocab if embedded else 0,
    }
    if not layers:
        values["window"] = None
    return values | _read_full_heads(fields, layers) | _read_experts(fields, wide)


def _read_full_heads(fields: Fields, windowed: tuple[int, ...]) -> dict[str, Any]:
    width, heads = fields.take("head_dim"), fields.take("num_key_value_heads")
    full = {"head_dim": fields.take("global_head_dim", 512)}
    if fields.take("attention_k_eq_v", False):
        full["num_key_value_heads"] = fields.take("num_global_key_value_heads", heads)
    else:
        fields.take("num_global_key_value_heads", None)  # transformers ignores it
    by_layer = fields.take("per_layer_config", None)  # transformers writes it instead of the two fields
    if by_layer is not None:
        layers = [i for i in range(fields.take("num_hidden_layers")) if i not in windowed]
        found = by_layer.items() if isinstance(by_layer, dict) else ()
        by_number = {int(key): value for key, value in found if str(key).isdigit()}  # keys such as "05"
        full = by_number.get(layers[-1])
        if not isinstance(full, dict) or by_number != dict.fromkeys(layers, full) or full.keys() - set(_PER_LAYER):
            raise ModelError(
                "config.json: per_layer_config must give one head_dim and num_key_value_heads for exactly the layers "
                f"that are 'full_attention' in layer_types, got {shown(by_layer)}."
            )
    elif fields.has("per_layer_config"):
        full = {}  # null: all layers are equal
    found = full.get("head_dim", width), full.get("num_key_value_heads", heads)
    if not all(isinstance(value, int) and 0 < value < 2**16 for value in found):
        raise fields.refusal("per_layer_config", by_layer)
    return {
        "full_head_dim": 0 if found[0] == width else found[0],
        "full_num_kv_heads": 0 if found[1] == heads else found[1],
    }


def _read_experts(fields: Fields, wide: bool) -> dict[str, Any]:
    names = ("num_experts", "top_k_experts", "moe_intermediate_size")
    if not fields.take("enable_moe_block", False):
        for name in names:
            fields.take(name, None)  # transformers ignores them
        return {}
    if wide:
        raise fields.refusal("use_double_wide_mlp", True)
    values = dict(zip(("num_experts", "experts_per_token", "expert_dim"), map(fields.take, names), strict=True))
    return values | {
        "shared_expert_dim": fields.take("intermediate_size"),
        "expert_norms": True,
        "router_norm": True,
        "router_normalize": True,
    }


def write_gemma4(d: Description) -> dict[str, Any]:
    """Write the fields of :func:`read_gemma4`."""
    config = {
        "final_logit_softcapping": d.logit_softcap,
        "global_head_dim": d.full_head_dim or d.head_dim,
        "num_global_key_value_heads": d.full_num_kv_heads or None,
        "attention_k_eq_v": d.full_keys_as_values,
        "num_kv_shared_layers": d.shared_kv_layers,
        "use_double_wide_mlp": d.shared_kv_intermediate_dim > 0,
        "hidden_size_per_layer_input": d.layer_embed_dim,
        "vocab_size_per_layer_input": d.layer_embed_vocab or d.vocab_size,
        "enable_moe_block": d.num_experts > 0,
    }
    names = {"num_experts": d.num_experts, "top_k_experts": d.experts_per_token, "moe_intermediate_size": d.expert_dim}
    return config | (names if d.num_experts else {})


FORMAT = HFFormat(
    "Gemma4ForCausalLM",
    "gemma4_text",
    "half",
    biases="attention_bias",
    qk_norm="before_rope",
    windows="sliding_window",
    window_layers=6,
    ropes=("kinds",),
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    fixed=(
        ("norm_order", "both"),
        ("norm_rounds_last", True),
        ("v_norm", True),
        ("attn_scale", 1.0),
        ("layer_scale", True),
    ),
    read_more=read_gemma4,
    write_more=write_gemma4,
    defaults=(
        ("head_dim", 256),
        ("max_position_embeddings", 131_072),
        ("num_attention_heads", 8),
        ("num_key_value_heads", 4),
        ("rope_parameters", _ROPES),
        ("sliding_window", 512),
        ("tie_word_embeddings", True),
        ("vocab_size", 262_144),
    ),
)

_LAYER, _OURS = "model.layers.{layer}.", "layers.{layer}."


def _rows() -> tuple[Row, ...]:
    """Rows of weights that are specific to Gemma 4."""
    per_layer = {
        "per_layer_input_gate.weight": "layer_embed.embed_gate.weight",
        "per_layer_projection.weight": "layer_embed.embed_proj.weight",
        "post_per_layer_input_norm.weight": "layer_embed.norm.scale",
    }
    norms = {
        "pre_feedforward_layernorm": "shared_input",
        "post_feedforward_layernorm_1": "shared_output",
        "pre_feedforward_layernorm_2": "input",
        "post_feedforward_layernorm_2": "output",
    }
    mlp = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    router = {"proj.weight": "gate.weight", "scale": "channel_scale", "per_expert_scale": "expert_scale"}
    whole = {
        "embed_tokens_per_layer.weight": "embeddings.weight",
        "per_layer_model_projection.weight": "projection.weight",
        "per_layer_projection_norm.weight": "norm.scale",
    }
    both = (f"{_OURS}mlp.experts.gate_proj", f"{_OURS}mlp.experts.up_proj")
    return (
        Row(f"{_LAYER}layer_scalar", f"{_OURS}layer_scale.scale", when="layer_scale"),
        *(Row(f"model.{theirs}", f"layer_embeddings.{ours}", when="layer_embed_dim") for theirs, ours in whole.items()),
        *(Row(f"{_LAYER}{theirs}", _OURS + ours, when="layer_embed_dim") for theirs, ours in per_layer.items()),
        *(
            Row(f"{_LAYER}{theirs}.weight", f"{_OURS}mlp.norms.{ours}.scale", when="expert_layers expert_norms")
            for theirs, ours in norms.items()
        ),
        *(
            Row(
                f"{_LAYER}mlp.{theirs}.weight",
                f"{_OURS}mlp.shared_expert.{ours}.weight",
                when="expert_layers shared_expert_dim",
            )
            for theirs, ours in mlp.items()
        ),
        *(
            Row(f"{_LAYER}router.{theirs}", f"{_OURS}mlp.router.{ours}", when="expert_layers")
            for theirs, ours in router.items()
        ),
        Row(f"{_LAYER}experts.gate_up_proj", both, FusedExperts(2), "expert_layers"),
        Row(f"{_LAYER}experts.down_proj", f"{_OURS}mlp.experts.down_proj", FusedExperts(), "expert_layers"),
    )


SPEC = family(
    "gemma4",
    FORMAT,
    hf_names(Identity(), NORMS).extended(_rows()),
    # Published files have unused key and value weights for layers that read the keys and values of another layer.
    untrained_modules=tuple(
        (f"self_attn.{name}", "shared_kv") for name in ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
    ),
)


def _windows(num_layers: int, full_every: int = 6) -> tuple[int, ...]:
    return tuple(i for i in range(num_layers) if (i + 1) % full_every)


_31B = FORMAT.describe(
    vocab_size=262_144,
    num_layers=60,
    embed_dim=5376,
    intermediate_dim=21_504,
    max_seq_len=262_144,
    num_heads=32,
    num_kv_heads=16,
    head_dim=256,
    full_head_dim=512,
    full_num_kv_heads=4,
    full_keys_as_values=True,
    window=1024,
    window_layers=_windows(60),
    rope_base=1_000_000.0,
    rope_window_base=10_000.0,
    rope_scaling=ProportionalRopeScaling(fraction=0.25),
    norm_eps=1e-6,
    embed_scale=5376**0.5,
    logit_softcap=30.0,
    tie_word_embeddings=True,
)
_E2B = replace(
    _31B,
    num_layers=35,
    embed_dim=1536,
    embed_scale=1536**0.5,
    intermediate_dim=6144,
    max_seq_len=131_072,
    num_heads=8,
    num_kv_heads=1,
    full_num_kv_heads=0,
    full_keys_as_values=False,
    window=512,
    window_layers=_windows(35, 5),
    shared_kv_layers=20,
    shared_kv_intermediate_dim=12_288,
    layer_embed_dim=256,
    layer_embed_vocab=262_144,
)
SIZES = {
    "gemma4_e2b": _E2B,
    "gemma4_e4b": replace(
        _E2B,
        num_layers=42,
        embed_dim=2560,
        embed_scale=2560**0.5,
        intermediate_dim=10_240,
        num_kv_heads=2,
        window_layers=_windows(42),
        shared_kv_layers=18,
        shared_kv_intermediate_dim=0,
    ),
    "gemma4_26b_a4b": replace(
        _31B,
        num_layers=30,
        embed_dim=2816,
        embed_scale=2816**0.5,
        intermediate_dim=2112,
        num_heads=16,
        num_kv_heads=8,
        full_num_kv_heads=2,
        window_layers=_windows(30),
        num_experts=128,
        experts_per_token=8,
        expert_dim=704,
        shared_expert_dim=2112,
        expert_norms=True,
        router_norm=True,
        router_normalize=True,
    ),
    "gemma4_31b": _31B,
}
BUILDERS = model_builders(__name__, "Gemma 4", SPEC, SIZES)

__all__ = ["SPEC", *BUILDERS]
