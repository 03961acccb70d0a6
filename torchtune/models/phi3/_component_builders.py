"""Phi-3 from its numbers."""

from torchtune.models._build import build
from torchtune.models._builders import from_numbers, lora_builder
from torchtune.models.phi3._model_builders import SPEC, phi3_description
from torchtune.modules.transformer import TransformerDecoder


@from_numbers
def phi3(
    vocab_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    embed_dim: int,
    intermediate_dim: int,
    max_seq_len: int,
    attn_dropout: float = 0.0,
    norm_eps: float = 1e-5,
    rope_base: float = 10_000,
) -> TransformerDecoder:
    """Build a decoder of the Phi-3 family from its numbers."""
    description = phi3_description(
        vocab_size=vocab_size,
        num_layers=num_layers,
        embed_dim=embed_dim,
        intermediate_dim=intermediate_dim,
        max_seq_len=max_seq_len,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        attn_dropout=attn_dropout,
        rope_base=rope_base,
        norm_eps=norm_eps,
    )
    return build(description, SPEC)


lora_phi3 = lora_builder(phi3, "lora_phi3", __name__, "a Phi-3 decoder with LoRA adapters from its numbers")
