"""Gemma from its numbers."""

from torchtune.models._build import build
from torchtune.models._builders import lora_builder
from torchtune.models.gemma._model_builders import SPEC, gemma_description
from torchtune.modules.transformer import TransformerDecoder


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
    """Build a decoder of the Gemma family from its numbers.

    Args:
        vocab_size: number of tokens.
        num_layers: number of layers.
        num_heads: query heads of a layer.
        head_dim: size of a head.
        num_kv_heads: key and value heads of a layer.
        embed_dim: width of the residual stream.
        intermediate_dim: width of the feed-forward layers.
        max_seq_len: longest sequence.
        attn_dropout: probability of dropping an attention weight.
        norm_eps: eps of the norms.
        rope_base: base of the rotary wavelengths.
    """
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
