"""Sizes of Gemma."""

from functools import partial
from typing import Any

from torchtune._lazy import former_names
from torchtune.models._family import (
    HF_INTERLEAVED,
    Description,
    Fields,
    HFFormat,
    component_builders,
    family,
    model_builders,
)


def _read(fields: Fields) -> dict[str, Any]:
    """Compute the embedding scale from the width; early files name the exact GELU but mean its tanh approximation."""
    found: dict[str, Any] = {"embed_scale": fields.take("hidden_size") ** 0.5}
    return found | ({"activation": "gelu_tanh"} if fields.peek("hidden_act") == "gelu" else {})


FORMAT = HFFormat(
    "GemmaForCausalLM",
    "gemma",
    "interleaved",
    biases="attention_bias",
    activation=("hidden_act", "gelu_pytorch_tanh"),
    fixed=(("norm_unit_offset", True),),
    only=(("hidden_activation", "gelu_pytorch_tanh"),),
    read_more=_read,
    defaults=(
        ("head_dim", 256),
        ("max_position_embeddings", 8192),
        ("num_key_value_heads", 16),
        ("tie_word_embeddings", True),
    ),
)
SPEC = family("gemma", FORMAT, HF_INTERLEAVED, model_types=("GEMMA",))

gemma_description = partial(
    FORMAT.describe,
    head_dim=256,
    max_seq_len=8192,
    norm_eps=1e-6,
    tie_word_embeddings=True,
)
_gemma = partial(gemma_description, vocab_size=256_000)

SIZES = {
    "gemma_2b": _gemma(
        num_layers=18, embed_dim=2048, intermediate_dim=16_384, num_heads=8, num_kv_heads=1, embed_scale=2048**0.5
    ),
    "gemma_7b": _gemma(
        num_layers=28, embed_dim=3072, intermediate_dim=24_576, num_heads=16, num_kv_heads=16, embed_scale=3072**0.5
    ),
}
BUILDERS = model_builders(__name__, "Gemma", SPEC, SIZES)


def _describe(embed_dim: int, **sizes: Any) -> Description:
    return gemma_description(embed_dim=embed_dim, embed_scale=embed_dim**0.5, **sizes)


COMPONENTS = component_builders(
    __name__,
    "gemma",
    "Gemma",
    SPEC,
    _describe,
    "vocab_size num_layers num_heads head_dim num_kv_heads embed_dim intermediate_dim max_seq_len",
    attn_dropout=0.0,
    norm_eps=1e-6,
    rope_base=10_000,
)

__getattr__ = former_names(__name__)
