"""Gemma 4, the text models.

Models are dense, have experts in parallel to the feed-forward, or have embeddings per layer.
"""

from dataclasses import replace
from typing import Any

from torchtune.models._builders import model_builders
from torchtune.models._description import Description, ModelError, ProportionalRopeScaling
from torchtune.models._hf_config import HFFormat
from torchtune.models._hf_fields import Fields, all_but_every, format_value, layers_of_type
from torchtune.models._spec import family
from torchtune.models._weight_map import Identity, Row
from torchtune.models._weight_names import hf_names
from torchtune.models._weight_ops import FusedExperts
from torchtune.models.gemma2 import NORMS

_ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}


def read_gemma4(fields: Fields) -> dict[str, Any]:
    """Read the layers of a ``config.json`` of Gemma 4 as values of a description."""
    if fields.take("use_bidirectional_attention", None) not in (None, False, "vision"):  # "vision": for images only
        raise fields.refusal("use_bidirectional_attention", fields.peek("use_bidirectional_attention"))
    num_layers = fields.take("num_hidden_layers")
    window_layers = _read_window_layers(fields, num_layers)
    num_shared = fields.take("num_kv_shared_layers", 0)
    # Only layers that share keys and values have the wider feed-forward.
    is_double_wide = bool(fields.take("use_double_wide_mlp", False) and num_shared)
    layer_embed_dim = fields.take("hidden_size_per_layer_input", 256)
    layer_embed_vocab = fields.take("vocab_size_per_layer_input", 262_144)
    values = {
        "window_layers": window_layers,
        "embed_scale": fields.take("hidden_size") ** 0.5,
        "logit_softcap": fields.take("final_logit_softcapping", None),
        "full_keys_as_values": bool(fields.take("attention_k_eq_v", False)),
        "shared_kv_layers": num_shared,
        "shared_kv_intermediate_dim": 2 * fields.take("intermediate_size") if is_double_wide else 0,
        "layer_embed_dim": layer_embed_dim,
        "layer_embed_vocab": layer_embed_vocab if layer_embed_dim else 0,
    }
    if not window_layers:
        values["window"] = None  # Description refuses a size of windows without layers
    values |= _read_full_heads(fields, window_layers)
    values |= _read_experts(fields, is_double_wide)
    return values


def _read_window_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Return the layers with a sliding window: in ``layer_types``, or five of six. The last layer has none."""
    layer_types = fields.layer_types(num_layers)
    if layer_types:
        layers = layers_of_type(layer_types[:num_layers], "sliding_attention")
    else:
        layers = all_but_every(num_layers, 6)
    return tuple(layer for layer in layers if layer != num_layers - 1)


def _read_full_heads(fields: Fields, window_layers: tuple[int, ...]) -> dict[str, Any]:
    """Read the size and number of heads in layers without a window."""
    head_dim = fields.take("head_dim")
    num_kv_heads = fields.take("num_key_value_heads")
    full = {"head_dim": fields.take("global_head_dim", 512)}
    if fields.take("attention_k_eq_v", False):
        full["num_key_value_heads"] = fields.take("num_global_key_value_heads", num_kv_heads)
    else:
        fields.take("num_global_key_value_heads", None)  # transformers ignores it
    per_layer = fields.take("per_layer_config", None)  # transformers writes it instead of the two fields
    if per_layer is not None:
        full = _full_layer_config(fields, per_layer, window_layers)
    elif fields.has("per_layer_config"):
        full = {}  # null: all layers are equal
    full_head_dim = full.get("head_dim", head_dim)
    full_num_kv_heads = full.get("num_key_value_heads", num_kv_heads)
    for value in (full_head_dim, full_num_kv_heads):
        if not isinstance(value, int) or not 0 < value < 2**16:
            raise fields.refusal("per_layer_config", per_layer)
    # 0 in a description: as in the layers with a window.
    if full_head_dim == head_dim:
        full_head_dim = 0
    if full_num_kv_heads == num_kv_heads:
        full_num_kv_heads = 0
    return {"full_head_dim": full_head_dim, "full_num_kv_heads": full_num_kv_heads}


def _full_layer_config(fields: Fields, per_layer: Any, window_layers: tuple[int, ...]) -> dict[str, Any]:
    """Return the entry of ``per_layer_config``, which must be the same for exactly the layers without a window."""
    full_layers = [layer for layer in range(fields.take("num_hidden_layers")) if layer not in window_layers]
    by_layer = {}
    if isinstance(per_layer, dict):
        by_layer = {int(key): config for key, config in per_layer.items() if str(key).isdigit()}  # keys such as "05"
    full = by_layer.get(full_layers[-1])
    is_same = isinstance(full, dict) and by_layer == dict.fromkeys(full_layers, full)
    if not is_same or full.keys() - {"head_dim", "num_key_value_heads"}:
        raise ModelError(
            "config.json: per_layer_config must give one head_dim and num_key_value_heads for exactly the layers "
            f"that are 'full_attention' in layer_types, got {format_value(per_layer)}."
        )
    return full


def _read_experts(fields: Fields, is_double_wide: bool) -> dict[str, Any]:
    if not fields.take("enable_moe_block", False):
        fields.skip("num_experts", "top_k_experts", "moe_intermediate_size")  # transformers ignores them
        return {}
    if is_double_wide:
        raise fields.refusal("use_double_wide_mlp", True)
    return {
        "num_experts": fields.take("num_experts"),
        "experts_per_token": fields.take("top_k_experts"),
        "expert_dim": fields.take("moe_intermediate_size"),
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
        "vocab_size_per_layer_input": d.layer_embed_vocab or d.vocab_size,  # no effect without per-layer embeddings
        "enable_moe_block": d.num_experts > 0,
    }
    if d.num_experts:
        config["num_experts"] = d.num_experts
        config["top_k_experts"] = d.experts_per_token
        config["moe_intermediate_size"] = d.expert_dim
    return config


FORMAT = HFFormat(
    "Gemma4ForCausalLM",
    "gemma4_text",
    "half",
    biases="attention_bias",
    qk_norm="before_rope",
    windows="sliding_window",
    window_layers=6,
    ropes=("by_layer_type",),
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    fixed={
        "norm_order": "both",
        "norm_rounds_last": True,
        "v_norm": True,
        "attn_scale": 1.0,
        "layer_scale": True,
    },
    read_more=read_gemma4,
    write_more=write_gemma4,
    defaults={
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "rope_parameters": _ROPES,
        "sliding_window": 512,
        "tie_word_embeddings": True,
        "vocab_size": 262_144,
    },
)

# Weights that other families lack: (Hugging Face's name, ours, when).
_MODEL_NAMES = (
    ("embed_tokens_per_layer.weight", "layer_embeddings.embeddings.weight", "layer_embed_dim"),
    ("per_layer_model_projection.weight", "layer_embeddings.projection.weight", "layer_embed_dim"),
    ("per_layer_projection_norm.weight", "layer_embeddings.norm.scale", "layer_embed_dim"),
)
_LAYER_NAMES = (
    ("layer_scalar", "layer_scale.scale", "layer_scale"),
    ("per_layer_input_gate.weight", "layer_embed.embed_gate.weight", "layer_embed_dim"),
    ("per_layer_projection.weight", "layer_embed.embed_proj.weight", "layer_embed_dim"),
    ("post_per_layer_input_norm.weight", "layer_embed.norm.scale", "layer_embed_dim"),
    # The shared expert has the names of a dense feed-forward.
    ("pre_feedforward_layernorm.weight", "mlp.norms.shared_input.scale", "expert_layers expert_norms"),
    ("post_feedforward_layernorm_1.weight", "mlp.norms.shared_output.scale", "expert_layers expert_norms"),
    ("pre_feedforward_layernorm_2.weight", "mlp.norms.input.scale", "expert_layers expert_norms"),
    ("post_feedforward_layernorm_2.weight", "mlp.norms.output.scale", "expert_layers expert_norms"),
    ("mlp.gate_proj.weight", "mlp.shared_expert.w1.weight", "expert_layers shared_expert_dim"),
    ("mlp.down_proj.weight", "mlp.shared_expert.w2.weight", "expert_layers shared_expert_dim"),
    ("mlp.up_proj.weight", "mlp.shared_expert.w3.weight", "expert_layers shared_expert_dim"),
    ("router.proj.weight", "mlp.router.gate.weight", "expert_layers"),
    ("router.scale", "mlp.router.channel_scale", "expert_layers"),
    ("router.per_expert_scale", "mlp.router.expert_scale", "expert_layers"),
)
_HF_LAYER = "model.layers.{layer}."
_EXPERTS = "layers.{layer}.mlp.experts."
_ROWS = (
    *(Row(f"model.{external}", tune, when=when) for external, tune, when in _MODEL_NAMES),
    *(Row(f"{_HF_LAYER}{external}", f"layers.{{layer}}.{tune}", when=when) for external, tune, when in _LAYER_NAMES),
    Row(
        f"{_HF_LAYER}experts.gate_up_proj",
        (f"{_EXPERTS}gate_proj", f"{_EXPERTS}up_proj"),
        FusedExperts(2),
        "expert_layers",
    ),
    Row(f"{_HF_LAYER}experts.down_proj", f"{_EXPERTS}down_proj", FusedExperts(), "expert_layers"),
)
SPEC = family(
    "gemma4",
    FORMAT,
    hf_names(Identity(), NORMS).extended(_ROWS),
    # Published files have unused key and value weights for layers that read the keys and values of another layer.
    untrained_modules=(
        ("self_attn.k_proj.", "shared_kv"),
        ("self_attn.v_proj.", "shared_kv"),
        ("self_attn.k_norm.", "shared_kv"),
        ("self_attn.v_norm.", "shared_kv"),
    ),
)


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
    window_layers=all_but_every(60, 6),
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
    window_layers=all_but_every(35, 5),
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
        window_layers=all_but_every(42, 6),
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
        window_layers=all_but_every(30, 6),
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
gemma4_e2b = BUILDERS["gemma4_e2b"]
lora_gemma4_e2b = BUILDERS["lora_gemma4_e2b"]
qlora_gemma4_e2b = BUILDERS["qlora_gemma4_e2b"]
gemma4_e4b = BUILDERS["gemma4_e4b"]
lora_gemma4_e4b = BUILDERS["lora_gemma4_e4b"]
qlora_gemma4_e4b = BUILDERS["qlora_gemma4_e4b"]
gemma4_26b_a4b = BUILDERS["gemma4_26b_a4b"]
lora_gemma4_26b_a4b = BUILDERS["lora_gemma4_26b_a4b"]
qlora_gemma4_26b_a4b = BUILDERS["qlora_gemma4_26b_a4b"]
gemma4_31b = BUILDERS["gemma4_31b"]
lora_gemma4_31b = BUILDERS["lora_gemma4_31b"]
qlora_gemma4_31b = BUILDERS["qlora_gemma4_31b"]

__all__ = ["SPEC", *BUILDERS]
