"""Gemma 2.

Soft caps, norms before and after attention and feed-forward, and a sliding window in every other layer
(https://arxiv.org/abs/2408.00118).
"""

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from torchtune._lazy import former_package
from torchtune.models._builders import component_builders, model_builders
from torchtune.models._description import Description
from torchtune.models._hf_config import HFFormat
from torchtune.models._hf_fields import Fields, all_but_every
from torchtune.models._spec import family
from torchtune.models._weight_names import hf_names
from torchtune.models._weight_ops import InterleaveRope
from torchtune.models.convert_weights import convert_by, describe_state_dict
from torchtune.models.gemma import GemmaTokenizer, gemma_tokenizer

# Norms of a layer: ours -> Hugging Face's.
NORMS = {
    "sa_norm": "input_layernorm",
    "sa_scale": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_scale": "post_feedforward_layernorm",
}


def read_softcaps(fields: Fields, *, attn: float | None, final: float | None) -> dict[str, Any]:
    """Read soft caps, attention scale and embedding scale; ``attn`` and ``final`` are the defaults of the caps."""
    # null means no cap, unlike an absent field.
    if fields.has("attn_logit_softcapping"):
        attn = None
    if fields.has("final_logit_softcapping"):
        final = None
    attn_scale = None  # the usual scale, head_dim**-0.5
    scalar = fields.take("query_pre_attn_scalar", 256)
    if scalar != fields.take("head_dim"):
        attn_scale = scalar**-0.5
    return {
        "attn_softcap": fields.take("attn_logit_softcapping", attn),
        "logit_softcap": fields.take("final_logit_softcapping", final),
        "attn_scale": attn_scale,
        "embed_scale": fields.take("hidden_size") ** 0.5,
    }


def write_softcaps(d: Description) -> dict[str, Any]:
    """Write the fields of :func:`read_softcaps`."""
    return {
        "attn_logit_softcapping": d.attn_softcap,
        "final_logit_softcapping": d.logit_softcap,
        "query_pre_attn_scalar": d.head_dim if d.attn_scale is None else round(d.attn_scale**-2),
    }


FORMAT = HFFormat(
    "Gemma2ForCausalLM",
    "gemma2",
    "interleaved",
    biases="attention_bias",
    windows="sliding_window",
    window_layers=2,
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    fixed={"norm_unit_offset": True, "norm_order": "both"},
    required_values={"use_bidirectional_attention": False},
    unused=("hidden_act",),  # in published files beside hidden_activation
    read_more=partial(read_softcaps, attn=50.0, final=30.0),
    write_more=write_softcaps,
    defaults={
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
)
SPEC = family("gemma2", FORMAT, hf_names(InterleaveRope(), NORMS), model_types=("GEMMA2",))


def gemma2_description(num_layers: int, embed_dim: int, *, full_every: int = 2, **numbers: Any) -> Description:
    """Make a description with Gemma 2's settings.

    Args:
        num_layers: number of layers.
        embed_dim: width of the residual stream.
        full_every: every n-th layer has full attention, the others a sliding window.
        **numbers: further fields, which replace Gemma 2's; with ``window`` 0 or None, no layer has a window.
    """
    common = {
        "head_dim": 256,
        "max_seq_len": 8192,
        "activation": "gelu_tanh",
        "norm_eps": 1e-6,
        "norm_unit_offset": True,
        "norm_order": "both",
        "tie_word_embeddings": True,
        "attn_softcap": 50.0,
        "logit_softcap": 30.0,
        "window": 4096,
        "embed_scale": embed_dim**0.5,
    }
    values = common | numbers
    layers = all_but_every(num_layers, full_every) if values["window"] else ()
    return FORMAT.describe(num_layers=num_layers, embed_dim=embed_dim, window_layers=layers, **values)


SIZES = {
    "gemma2_2b": gemma2_description(26, 2304, vocab_size=256_000, intermediate_dim=9216, num_heads=8, num_kv_heads=4),
    "gemma2_9b": gemma2_description(
        42, 3584, vocab_size=256_000, intermediate_dim=14_336, num_heads=16, num_kv_heads=8
    ),
    "gemma2_27b": gemma2_description(
        46,
        4608,
        vocab_size=256_000,
        intermediate_dim=36_864,
        num_heads=32,
        num_kv_heads=16,
        head_dim=128,
        attn_scale=144**-0.5,  # embed_dim / num_heads, not head_dim
    ),
}
BUILDERS = model_builders(__name__, "Gemma 2", SPEC, SIZES)
gemma2_2b = BUILDERS["gemma2_2b"]
lora_gemma2_2b = BUILDERS["lora_gemma2_2b"]
qlora_gemma2_2b = BUILDERS["qlora_gemma2_2b"]
gemma2_9b = BUILDERS["gemma2_9b"]
lora_gemma2_9b = BUILDERS["lora_gemma2_9b"]
qlora_gemma2_9b = BUILDERS["qlora_gemma2_9b"]
gemma2_27b = BUILDERS["gemma2_27b"]
lora_gemma2_27b = BUILDERS["lora_gemma2_27b"]
qlora_gemma2_27b = BUILDERS["qlora_gemma2_27b"]


def _describe(
    head_dim: int,
    hidden_capping_value: float,
    final_capping_value: float,
    sliding_window_size: int,
    query_pre_attn_scalar: int | None,
    **sizes: Any,
) -> Description:
    attn_scale = None
    if query_pre_attn_scalar not in (None, head_dim):
        attn_scale = query_pre_attn_scalar**-0.5
    return gemma2_description(
        **sizes,
        head_dim=head_dim,
        attn_softcap=hidden_capping_value,
        logit_softcap=final_capping_value,
        window=sliding_window_size,
        attn_scale=attn_scale,
    )


COMPONENTS = component_builders(
    __name__,
    "gemma2",
    "Gemma 2",
    SPEC,
    _describe,
    (
        "vocab_size",
        "num_layers",
        "num_heads",
        "head_dim",
        "num_kv_heads",
        "embed_dim",
        "intermediate_dim",
        "max_seq_len",
    ),
    attn_dropout=0.0,
    norm_eps=1e-6,
    rope_base=10_000,
    hidden_capping_value=50.0,
    final_capping_value=30.0,
    sliding_window_size=4096,
    query_pre_attn_scalar=None,
)
gemma2 = COMPONENTS["gemma2"]
lora_gemma2 = COMPONENTS["lora_gemma2"]


def gemma2_hf_to_tune(
    state_dict: dict[str, Tensor],
    num_heads: int = 32,
    num_kv_heads: int = 32,
    dim: int = 4096,
    head_dim: int | None = None,
) -> dict[str, Tensor]:
    """Convert weights from Hugging Face names to ours."""
    description = describe_state_dict(state_dict, num_heads, num_kv_heads, dim, head_dim, True)
    return convert_by(SPEC.weight_map("hf"), state_dict, replace(description, norm_order="both"), to_tune=True)


def gemma2_tune_to_hf(
    state_dict: dict[str, Tensor],
    num_heads: int = 32,
    num_kv_heads: int = 32,
    dim: int = 4096,
    head_dim: int | None = None,
) -> dict[str, Tensor]:
    """Convert weights from our names to Hugging Face names."""
    description = describe_state_dict(state_dict, num_heads, num_kv_heads, dim, head_dim, True)
    return convert_by(SPEC.weight_map("hf"), state_dict, replace(description, norm_order="both"), to_tune=False)


__all__ = ["SPEC", *BUILDERS, *COMPONENTS, "GemmaTokenizer", "gemma_tokenizer"]
__getattr__, __path__ = former_package(__name__)
