"""Gemma 2 from its numbers."""

from torchtune.models._build import build
from torchtune.models._builders import from_numbers, lora_builder
from torchtune.models.gemma2._model_builders import SPEC, gemma2_description
from torchtune.modules.transformer import TransformerDecoder


@from_numbers
def gemma2(
    vocab_size: int,
    num_layers: int,
    num_heads: int,
    head_dim: int,
    num_kv_heads: int,
    embed_dim: int,
    intermediate_dim: int,
    max_seq_len: int,
    attn_dropout: float = 0.0,
    norm_eps: float = 1e-6,
    rope_base: float = 10_000,
    hidden_capping_value: float = 50.0,
    final_capping_value: float = 30.0,
    sliding_window_size: int = 4096,
    query_pre_attn_scalar: int | None = None,
) -> TransformerDecoder:
    """Build a decoder of the Gemma 2 family from its numbers."""
    description = gemma2_description(
        num_layers,
        embed_dim,
        vocab_size=vocab_size,
        num_heads=num_heads,
        head_dim=head_dim,
        num_kv_heads=num_kv_heads,
        intermediate_dim=intermediate_dim,
        max_seq_len=max_seq_len,
        attn_dropout=attn_dropout,
        norm_eps=norm_eps,
        rope_base=rope_base,
        attn_softcap=hidden_capping_value,
        logit_softcap=final_capping_value,
        window=sliding_window_size,
        attn_scale=None if query_pre_attn_scalar in (None, head_dim) else query_pre_attn_scalar**-0.5,
    )
    return build(description, SPEC)


lora_gemma2 = lora_builder(gemma2, "lora_gemma2", __name__, "a Gemma 2 decoder with LoRA adapters from its numbers")
