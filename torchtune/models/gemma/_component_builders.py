"""Component builders of Gemma."""

from typing import Any

from torchtune.models._builders import component_builders
from torchtune.models._description import Description
from torchtune.models.gemma._model_builders import SPEC, gemma_description


def _describe(embed_dim: int, **sizes: Any) -> Description:
    return gemma_description(embed_dim=embed_dim, embed_scale=embed_dim**0.5, **sizes)


gemma, lora_gemma = component_builders(
    "gemma",
    __name__,
    "Gemma",
    SPEC,
    _describe,
    "vocab_size num_layers num_heads head_dim num_kv_heads embed_dim intermediate_dim max_seq_len",
    attn_dropout=0.0,
    norm_eps=1e-6,
    rope_base=10_000,
)
