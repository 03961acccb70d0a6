"""Gemma from its numbers."""

from torchtune.models._build import build
from torchtune.models._builders import from_numbers, lora_builder
from torchtune.models.gemma._model_builders import SPEC, gemma_description
from torchtune.modules.transformer import TransformerDecoder


@from_numbers
def gemma(
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
) -> TransformerDecoder:
    """Build a decoder of the Gemma family from its numbers."""
    description = gemma_description(
        vocab_size=vocab_size,
        num_layers=num_layers,
        num_heads=num_heads,
        head_dim=head_dim,
        num_kv_heads=num_kv_heads,
        embed_dim=embed_dim,
        intermediate_dim=intermediate_dim,
        max_seq_len=max_seq_len,
        attn_dropout=attn_dropout,
        norm_eps=norm_eps,
        rope_base=rope_base,
        embed_scale=embed_dim**0.5,
    )
    return build(description, SPEC)


lora_gemma = lora_builder(gemma, "lora_gemma", __name__, "a Gemma decoder with LoRA adapters from its numbers")
