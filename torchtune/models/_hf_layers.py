"""Read and write experts, layers without RoPE, latent attention and mixers of a Hugging Face ``config.json``."""

import math
from typing import Any

from torchtune.models._description import Description, ModelError
from torchtune.models._hf_fields import (
    Fields,
    all_but_every,
    is_number,
    is_whole,
    layers_of_type,
    write_layer_types,
)
from torchtune.models._mixers import DeltaNetMixer, Mamba2Mixer, Names
from torchtune.models._weight_ops import HeadGroups

# Fields of experts that transformers does not read; two are numbers of MTP layers, which are not trained.
_UNUSED = ("ep_size", "aux_loss_alpha", "seq_aux", "num_nextn_predict_layers", "num_mtp_layers")


def router_fields(*, experts_per_token: int, scale: float = 1.0, groups: int = 1, top: int = 1) -> tuple[Any, ...]:
    """Return the router's fields for ``HFFormat.extra_fields``, with the defaults of ``transformers``."""
    return (
        ("num_experts_per_tok", "experts_per_token", experts_per_token),
        ("norm_topk_prob", "router_normalize", True),
        ("routed_scaling_factor", "router_scale", scale),
        ("n_group", "router_groups", groups),
        ("topk_group", "router_top_groups", top),
    )


def read_experts(fields: Fields, num_experts: int, expert_dim: int, *, num_dense_layers: int) -> dict[str, Any]:
    """Read experts and shared experts as values of a description.

    Args:
        fields: fields of the file.
        num_experts: default number of experts in ``transformers``.
        expert_dim: default width of an expert.
        num_dense_layers: default number of leading layers without experts.
    """
    fields.skip(*_UNUSED)
    # Sigmoid scores with a selection bias and no auxiliary loss (https://arxiv.org/abs/2408.15664).
    fields.require(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    expert_dim = fields.take("moe_intermediate_size", expert_dim)
    num_layers = fields.take("num_hidden_layers")
    num_dense_layers = min(fields.take("first_k_dense_replace", num_dense_layers), num_layers)
    return {
        "num_experts": fields.take("n_routed_experts", fields.take("num_local_experts", num_experts)),
        "expertless_layers": tuple(range(num_dense_layers)),
        # The shared experts of a token are one feed-forward of their total width.
        "shared_expert_dim": fields.take("n_shared_experts", 1) * expert_dim,
        "expert_dim": expert_dim,
    }


def write_experts(d: Description) -> dict[str, Any]:
    """Write the fields of :func:`read_experts`."""
    return {
        "n_routed_experts": d.num_experts,
        "first_k_dense_replace": len(d.expertless_layers),
        "n_shared_experts": d.shared_expert_dim // d.expert_dim,
        "moe_intermediate_size": d.expert_dim,
        "num_nextn_predict_layers": 0,
    }


def read_qwen_experts(fields: Fields, num_experts: int) -> dict[str, Any]:
    """Read the number of experts and the layers without experts of Qwen's mixtures as values of a description.

    Args:
        fields: fields of the file.
        num_experts: default number of experts in ``transformers``.
    """
    num_experts = fields.take("num_local_experts", num_experts)  # the name in transformers 5
    num_layers = fields.take("num_hidden_layers")
    # Every step-th layer has experts, unless it is in the list.
    step = max(fields.take("decoder_sparse_step", 1), 1)
    dense_layers = fields.list_of("mlp_only_layers", num_layers, int, default=[])
    return {
        "num_experts": fields.take("num_experts", num_experts),
        "expertless_layers": tuple(layer for layer in range(num_layers) if layer in dense_layers or (layer + 1) % step),
    }


def write_qwen_experts(d: Description) -> dict[str, Any]:
    """Write the fields of :func:`read_qwen_experts`."""
    return {"num_experts": d.num_experts, "mlp_only_layers": list(d.expertless_layers), "decoder_sparse_step": 1}


def read_unrotated_layers(fields: Fields) -> tuple[int, ...]:
    """Read the layers without RoPE of Llama 4 and SmolLM 3: by default, every fourth."""
    num_layers = fields.take("num_hidden_layers")
    interval = max(fields.take("no_rope_layer_interval", 4), 1)
    has_rope = fields.list_of("no_rope_layers", num_layers, int)  # despite its name, nonzero for layers with RoPE
    if not has_rope:
        has_rope = [(layer + 1) % interval for layer in range(num_layers)]
    if len(has_rope) < num_layers:
        raise fields.refusal("no_rope_layers", has_rope)
    return tuple(layer for layer in range(num_layers) if not has_rope[layer])


def write_unrotated_layers(d: Description) -> dict[str, Any]:
    """Write the fields of :func:`read_unrotated_layers`."""
    return {"no_rope_layers": [int(layer not in d.unrotated_layers) for layer in range(d.num_layers)]}


def read_latents(
    fields: Fields, *, kv_latent_dim: int, q_latent_dim: int, unrotated_dim: int, value_dim: int, whole_head: bool
) -> dict[str, Any]:
    """Read latent attention as values of a description.

    Args:
        fields: fields of the file.
        kv_latent_dim: default width of the latent of keys and values in ``transformers``.
        q_latent_dim: default width of the latent of queries; ``null`` in the file means no latent.
        unrotated_dim: default number of unrotated channels of a key.
        value_dim: default size of a value.
        whole_head: whether ``head_dim``, if present, counts all channels of a key, instead of only the rotated ones.
    """
    rope_dim = fields.take("qk_rope_head_dim", 64)
    unrotated_dim = fields.take("qk_nope_head_dim", unrotated_dim)
    fields.skip("qk_head_dim", "num_key_value_heads")  # redundant: the sum of the two sizes, and num_attention_heads
    if whole_head:
        size_name = "qk_nope_head_dim + qk_rope_head_dim"
        size = unrotated_dim + rope_dim
    else:
        size_name = "qk_rope_head_dim"
        size = rope_dim
    if fields.take("head_dim", size) != size:
        raise ModelError(
            f"config.json has head_dim = {fields.peek('head_dim')}, where {size_name} is {size}: correct one."
        )
    if fields.has("q_lora_rank") and fields.peek("q_lora_rank") is None:
        q_latent_dim = 0
    return {
        "num_kv_heads": fields.take("num_attention_heads"),
        "head_dim": rope_dim + unrotated_dim,
        "rope_dim": rope_dim,
        "kv_latent_dim": fields.take("kv_lora_rank", kv_latent_dim),
        "q_latent_dim": fields.take("q_lora_rank", q_latent_dim),
        "value_dim": fields.take("v_head_dim", value_dim),
        "rope_layout": "interleaved" if fields.take("rope_interleave", True) else "half",
    }


def write_latents(d: Description, *, whole_head: bool) -> dict[str, Any]:
    """Write the fields of :func:`read_latents`."""
    return {
        "head_dim": d.head_dim if whole_head else d.rope_dim,
        "qk_nope_head_dim": d.head_dim - d.rope_dim,
        "qk_rope_head_dim": d.rope_dim,
        "kv_lora_rank": d.kv_latent_dim,
        "q_lora_rank": d.q_latent_dim or None,
        "v_head_dim": d.value_dim,
        "rope_interleave": d.rope_layout == "interleaved",
    }


# Sizes of mixers: (name in config.json, name in the mixer, default of transformers).
_DELTA_NET_SIZES = (
    ("linear_num_key_heads", "num_key_heads", 16),
    ("linear_num_value_heads", "num_value_heads", 32),
    ("linear_key_head_dim", "key_dim", 128),
    ("linear_value_head_dim", "value_dim", 128),
    ("linear_conv_kernel_dim", "conv_taps", 4),
)
_MAMBA_SIZES = (
    ("mamba_n_heads", "num_heads", 128),
    ("mamba_n_groups", "num_groups", 1),
    ("mamba_d_state", "state_dim", 256),
    ("mamba_d_conv", "conv_taps", 4),
)

# Weight names of DeltaNetMixer with fused input projections; checkpoints order their rows by key head.
FUSED_DELTA_NET: Names = (
    (
        "linear_attn.in_proj_qkvz.weight",
        "qkvz_proj.weight",
        HeadGroups(("key_dim", "key_dim", "group_dim", "group_dim")),
    ),
    ("linear_attn.in_proj_ba.weight", "ba_proj.weight", HeadGroups(("group_heads", "group_heads"))),
    *DeltaNetMixer.names[4:],
)


def require_silu(fields: Fields, name: str = "hidden_act") -> None:
    """Raise unless the activation is SiLU: ``transformers`` also uses the field in a mixer's convolution."""
    fields.choice(name, {"silu": None, "swish": None}, "silu")


def read_delta_net(fields: Fields, *, fused: bool = False) -> dict[str, Any]:
    """Read the Gated DeltaNet layers of Qwen 3.5 or Qwen3-Next as values of a description.

    Args:
        fields: fields of the file.
        fused: whether checkpoints of the architecture hold fused input projections.
    """
    num_layers = fields.take("num_hidden_layers")
    layers = all_but_every(num_layers, fields.take("full_attention_interval", 4))
    layer_types = fields.layer_types(num_layers)
    if layer_types is not None:
        layers = layers_of_type(layer_types[:num_layers], "linear_attention")
    # Fields of MTP layers, which are not trained, and of caches.
    fields.skip("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype")
    fields.require(attn_output_gate=True)
    sizes = {attribute: fields.take(name, default) for name, attribute, default in _DELTA_NET_SIZES}
    if not layers:
        return {"mixer": None, "mixer_layers": ()}
    require_silu(fields)
    return {"mixer": DeltaNetMixer(**sizes, fused=fused), "mixer_layers": layers}


def write_delta_net(d: Description) -> dict[str, Any]:
    """Write the fields of :func:`read_delta_net`."""
    config: dict[str, Any] = {"layer_types": write_layer_types(d.num_layers, d.mixer_layers, "linear_attention")}
    if d.mixer is not None:
        for name, attribute, _ in _DELTA_NET_SIZES:
            config[name] = getattr(d.mixer, attribute)
    return config


def read_mamba(fields: Fields, inner_dim: int, **settings: Any) -> Mamba2Mixer:
    """Read the Mamba layers of Granite 4 or Falcon-H1.

    Args:
        fields: fields of the file.
        inner_dim: total width of all heads.
        **settings: further arguments of the mixer.
    """
    sizes = {attribute: fields.take(name, default) for name, attribute, default in _MAMBA_SIZES}
    fields.skip("mamba_chunk_size")  # only affects how transformers computes
    require_silu(fields)
    fields.require(mamba_conv_bias=True, mamba_proj_bias=False)
    num_heads = sizes["num_heads"]
    head_dim = fields.take("mamba_d_head", "auto")
    if head_dim == "auto":
        head_dim = inner_dim // max(num_heads, 1)  # no division by 0: the checks below raise
    if not is_whole(head_dim, 2**16):
        raise fields.refusal("mamba_d_head", head_dim)
    if head_dim * num_heads != inner_dim:
        raise ModelError(
            f"config.json has mamba_n_heads = {num_heads} heads of mamba_d_head = {head_dim}, which together "
            f"are not {inner_dim} wide (mamba_d_ssm, or mamba_expand * hidden_size): download it again, or correct it."
        )
    dt_min, dt_max = _read_time_step_limit(fields)
    return Mamba2Mixer(**sizes, head_dim=int(head_dim), dt_min=dt_min, dt_max=dt_max, **settings)


_INFINITY = {"__float__": "Infinity"}  # as written by transformers, because JSON has no infinity


def _read_time_step_limit(fields: Fields) -> tuple[float, float]:
    """Return the smallest and the largest step size."""
    limits = fields.take("time_step_limit", (0.0, math.inf))
    if not isinstance(limits, list | tuple) or len(limits) != 2:
        raise fields.refusal("time_step_limit", limits)
    values = []
    for limit in limits:
        value = math.inf if limit == _INFINITY else limit
        if not is_number(value) and value != math.inf:
            raise fields.refusal("time_step_limit", limits)
        values.append(float(value))
    return values[0], values[1]


def write_mamba(mixer: Mamba2Mixer) -> dict[str, Any]:
    """Write the fields of :func:`read_mamba`."""
    config = {name: getattr(mixer, attribute) for name, attribute, _ in _MAMBA_SIZES}
    config["mamba_d_head"] = mixer.head_dim
    if (mixer.dt_min, mixer.dt_max) != (0.0, math.inf):
        largest: Any = mixer.dt_max
        if largest == math.inf:
            largest = _INFINITY
        config["time_step_limit"] = [mixer.dt_min, largest]
    return config
