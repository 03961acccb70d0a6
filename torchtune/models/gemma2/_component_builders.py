"""Component builders of Gemma 2."""

from typing import Any

from torchtune.models._builders import component_builders
from torchtune.models._description import Description
from torchtune.models.gemma2._model_builders import SPEC, gemma2_description


def _describe(
    head_dim: int,
    hidden_capping_value: float,
    final_capping_value: float,
    sliding_window_size: int,
    query_pre_attn_scalar: int | None,
    **sizes: Any,
) -> Description:
    return gemma2_description(
        **sizes,
        head_dim=head_dim,
        attn_softcap=hidden_capping_value,
        logit_softcap=final_capping_value,
        window=sliding_window_size,
        attn_scale=None if query_pre_attn_scalar in (None, head_dim) else query_pre_attn_scalar**-0.5,
    )


gemma2, lora_gemma2 = component_builders(
    "gemma2",
    __name__,
    "Gemma 2",
    SPEC,
    _describe,
    "vocab_size num_layers num_heads head_dim num_kv_heads embed_dim intermediate_dim max_seq_len",
    attn_dropout=0.0,
    norm_eps=1e-6,
    rope_base=10_000,
    hidden_capping_value=50.0,
    final_capping_value=30.0,
    sliding_window_size=4096,
    query_pre_attn_scalar=None,
)
