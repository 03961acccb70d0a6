"""Read and write experts and latent attention of a ``config.json`` with the fields of DeepSeek V3."""

from typing import Any

from torchtune.models._description import Description, ModelError
from torchtune.models._hf_fields import Fields

# Fields that transformers does not read.
_UNUSED = ("ep_size", "aux_loss_alpha", "seq_aux", "auto_map", "num_nextn_predict_layers", "num_mtp_layers")


def router_fields(*, experts_per_token: int, scale: float = 1.0, groups: int = 1, top: int = 1) -> tuple[Any, ...]:
    """Return the router's fields for ``HFFormat.own``, with the defaults of ``transformers``."""
    return (
        ("num_experts_per_tok", "experts_per_token", experts_per_token),
        ("norm_topk_prob", "router_normalize", True),
        ("routed_scaling_factor", "router_scale", scale),
        ("n_group", "router_groups", groups),
        ("topk_group", "router_top_groups", top),
    )


def read_experts(fields: Fields, number: int, width: int, *, first_dense: int) -> dict[str, Any]:
    """Read experts and shared experts as values of a description.

    Args:
        fields: fields of the file.
        number: default number of experts in ``transformers``.
        width: default width of an expert.
        first_dense: default number of leading layers without experts.
    """
    fields.skip(*_UNUSED)  # two of them are numbers of MTP layers, which are not trained
    fields.require(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    width, layers = fields.take("moe_intermediate_size", width), fields.take("num_hidden_layers")
    return {
        "num_experts": fields.take("n_routed_experts", fields.take("num_local_experts", number)),
        "expertless_layers": tuple(range(min(fields.take("first_k_dense_replace", first_dense), layers))),
        "shared_expert_dim": fields.take("n_shared_experts", 1) * width,
        "expert_dim": width,
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


def read_latents(fields: Fields, *, kv: int, queries: int, keys: int, values: int, whole_head: bool) -> dict[str, Any]:
    """Read latent attention as values of a description.

    Args:
        fields: fields of the file.
        kv: default width of the latent of keys and values in ``transformers``.
        queries: default width of the latent of queries; ``null`` in the file means no latent.
        keys: default number of unrotated channels of a key.
        values: default size of a value.
        whole_head: whether ``head_dim``, if present, counts all channels of a key, instead of only the rotated ones.
    """
    turning, fixed = fields.take("qk_rope_head_dim", 64), fields.take("qk_nope_head_dim", keys)
    fields.skip("qk_head_dim", "num_key_value_heads")  # redundant: the sum of the two sizes, and num_attention_heads
    parts = "qk_nope_head_dim + qk_rope_head_dim" if whole_head else "qk_rope_head_dim"
    size = turning + fixed * whole_head
    if fields.take("head_dim", size) != size:
        raise ModelError(f"config.json has head_dim = {fields.peek('head_dim')}, where {parts} is {size}: correct one.")
    no_latent = fields.has("q_lora_rank") and fields.peek("q_lora_rank") is None
    return {
        "num_kv_heads": fields.take("num_attention_heads"),
        "head_dim": turning + fixed,
        "rope_dim": turning,
        "kv_latent_dim": fields.take("kv_lora_rank", kv),
        "q_latent_dim": 0 if no_latent else fields.take("q_lora_rank", queries),
        "value_dim": fields.take("v_head_dim", values),
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
