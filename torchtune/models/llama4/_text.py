"""Text model of Llama 4: its format, sizes and tokenizer."""

from dataclasses import replace
from typing import Any

from torchtune.models._family import (
    HF_HALF,
    Description,
    Fields,
    HFFormat,
    Llama3RopeScaling,
    experts,
    family,
    renamed,
    shared_expert,
    with_fused_experts,
)
from torchtune.tokenizers import HeaderTurns

_KINDS = ("full_attention", "chunked_attention")


def _read(fields: Fields) -> dict[str, Any]:
    layers, width = fields.take("num_hidden_layers"), fields.take("intermediate_size", 8192)
    interval, step = fields.take("no_rope_layer_interval", 4), fields.take("interleave_moe_layer_step", 1)
    turning = fields.list_of("no_rope_layers", layers, int) or [(i + 1) % max(interval, 1) for i in range(layers)]
    kinds = fields.list_of("layer_types", layers, str) or [_KINDS[bool(turns)] for turns in turning]
    unknown = [kind for kind in kinds[:layers] if kind not in _KINDS]
    if unknown or len(kinds) < layers or len(turning) < layers:
        raise fields.refusal("layer_types" if unknown or len(kinds) < layers else "no_rope_layers", unknown or turning)
    mixtures = fields.list_of("moe_layers", layers, int)
    mixtures = range(step - 1, layers, max(step, 1)) if mixtures is None else mixtures
    unrotated = tuple(i for i in range(layers) if not turning[i])
    chunked = tuple(i for i in range(layers) if kinds[i] == "chunked_attention")
    stated = fields.has("attention_chunk_size") and fields.peek("attention_chunk_size") is None
    if chunked and stated:
        raise fields.refusal("attention_chunk_size", None)
    size, span = fields.take("attention_chunk_size", 8192), fields.take("floor_scale", 8192)
    growth = {"query_growth": float(fields.take("attn_scale", 0.1)), "query_growth_span": span}
    grows = fields.take("attn_temperature_tuning", True) and unrotated
    return {
        "intermediate_dim": fields.take("intermediate_size_mlp", 16_384),
        "num_experts": fields.take("num_local_experts", 16),
        "expert_dim": width,
        "shared_expert_dim": width,
        "expertless_layers": tuple(i for i in range(layers) if i not in mixtures),
        "unrotated_layers": unrotated,
        "chunk": size if chunked else None,
        "chunk_layers": chunked,
        **({**growth, "query_growth_first": 1, "query_growth_layers": unrotated} if grows else {}),
    }


def _write(d: Description) -> dict[str, Any]:
    return {
        "intermediate_size_mlp": d.intermediate_dim,
        "intermediate_size": d.expert_dim,
        "num_local_experts": d.num_experts,
        "moe_layers": list(d.expert_layers),
        "no_rope_layers": [int(i not in d.unrotated_layers) for i in range(d.num_layers)],
        "layer_types": [_KINDS[i in d.chunk_layers] for i in range(d.num_layers)],
        "attention_chunk_size": d.chunk,
        "attn_temperature_tuning": bool(d.query_growth),
        **({"attn_scale": d.query_growth, "floor_scale": d.query_growth_span} if d.query_growth else {}),
    }


FORMAT = HFFormat(
    "Llama4ForCausalLM",
    "llama4_text",
    "interleaved",
    biases="attention_bias",
    mixer_kind="chunked_attention",
    fixed=(("router_scores", "sigmoid"), ("router_scales_input", True)),
    extra_fields=(
        ("num_experts_per_tok", "experts_per_token", 1),
        ("use_qk_norm", "qk_unit_norm", True),
        ("router_aux_loss_coef", "router_balance", 0.001),
    ),
    read_more=_read,
    write_more=_write,
    defaults=(
        ("num_key_value_heads", 8),
        ("head_dim", 128),
        ("max_position_embeddings", 131_072),
        ("rms_norm_eps", 1e-5),
        ("rope_theta", 500_000.0),
    ),
)
_EXPERTS = with_fused_experts(experts(HF_HALF, "mlp", "gate_proj", "up_proj", "down_proj"), "mlp", transpose=False)
_NAMES = {".mlp.gate.": ".mlp.router.", ".mlp.": ".feed_forward."}
SPEC = family(
    "llama4",
    FORMAT,
    renamed(shared_expert(_EXPERTS, "mlp.shared_expert"), _NAMES),
    model_types=("LLAMA4",),
    module_prefixes={"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
)

_UNROTATED = tuple(range(3, 48, 4))
_SCOUT = FORMAT.describe(
    vocab_size=202_048,
    num_layers=48,
    embed_dim=5120,
    intermediate_dim=16_384,
    max_seq_len=10_485_760,
    num_heads=40,
    num_kv_heads=8,
    head_dim=128,
    qk_unit_norm=True,
    chunk=8192,
    chunk_layers=tuple(i for i in range(48) if i not in _UNROTATED),
    rope_base=500_000.0,
    rope_scaling=Llama3RopeScaling(factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0, original_max_seq_len=8192),
    unrotated_layers=_UNROTATED,
    query_growth=0.1,
    query_growth_span=8192,
    query_growth_first=1,
    query_growth_layers=_UNROTATED,
    num_experts=16,
    experts_per_token=1,
    expert_dim=8192,
    router_balance=0.001,
    shared_expert_dim=8192,
)
SIZES = {
    "llama4_scout_17b_16e": _SCOUT,
    "llama4_maverick_17b_128e": replace(
        _SCOUT,
        max_seq_len=1_048_576,
        qk_unit_norm=False,
        rope_scaling=None,
        num_experts=128,
        expertless_layers=tuple(range(0, 48, 2)),
    ),
}


_FIRST_ID = 200_000
_TEXT, _VISION, _REASONING = (
    [f"{kind}reserved_special_token_{i}" for i in range(count)]
    for kind, count in (("text_post_train_", 69), ("vision_", 1048), ("reasoning_", 8))
)
_NAMES = (
    *("begin_of_text", "end_of_text", "fim_prefix", "fim_middle", "fim_suffix"),
    *("header_start", "header_end", "eom", "eot", "step"),
    *(*_TEXT[:8], "finetune_right_pad", *_TEXT[8:]),
    *("image_start", "image_end", *_VISION[:2], "tile_x_separator", "tile_y_separator", *_VISION[2:6]),
    *("image", _VISION[6], "patch", *_VISION[7:]),
    *(*_REASONING, "reasoning_thinking_start", "reasoning_thinking_end"),
    *(f"reserved_special_token_{i}" for i in range(904)),
)
LLAMA4_SPECIAL_TOKENS = {f"<|{name}|>": _FIRST_ID + i for i, name in enumerate(_NAMES)}
O200K_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Llama4Tokenizer(HeaderTurns):
    """tiktoken tokenizer with Llama 4's chat format.

    Args:
        path: path of Meta's ``tokenizer.model``.
        special_tokens: text -> id; by default Llama 4's.
        max_seq_len: maximum number of tokens; ``None``: no truncation.
        prompt_template: adds texts to the messages before they are formatted.
        truncation_type: ``"right"`` cuts the end of a long row, ``"left"`` the beginning.

    Raises:
        DataError: the file is missing or broken, or a required special token is missing.
    """

    family = "Llama 4"
    pattern = O200K_PATTERN
    required = ("begin_of_text", "end_of_text", "header_start", "header_end", "eom", "eot")
    optional = ("finetune_right_pad", "step")
    default_tokens = LLAMA4_SPECIAL_TOKENS
