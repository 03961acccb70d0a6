"""Llama 3.1 from its numbers."""

from torchtune.models._build import build
from torchtune.models._builders import lora_builder, scale_hidden_dim_for_mlp
from torchtune.models._description import Description
from torchtune.models._rope_scaling import Llama3RopeScaling
from torchtune.models.llama3_1._model_builders import SPEC
from torchtune.modules.transformer import TransformerDecoder


def llama3_1(
    vocab_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    embed_dim: int,
    max_seq_len: int,
    attn_dropout: float = 0.0,
    rope_base: float = 500_000,
    intermediate_dim: int | None = None,
    norm_eps: float = 1e-5,
    scale_factor: float = 8,
) -> TransformerDecoder:
    """Build a decoder of the Llama 3.1 family from its numbers.

    Args:
        vocab_size: number of tokens.
        num_layers: number of layers.
        num_heads: query heads of a layer.
        num_kv_heads: key and value heads of a layer.
        embed_dim: width of the residual stream.
        max_seq_len: longest sequence.
        attn_dropout: probability of dropping an attention weight.
        rope_base: base of the rotary wavelengths.
        intermediate_dim: width of the feed-forward layers; by default derived from ``embed_dim``.
        norm_eps: eps of the norms.
        scale_factor: how far positions are stretched (Llama 3.1's rule).
    """
    description = Description(
        vocab_size=vocab_size,
        num_layers=num_layers,
        embed_dim=embed_dim,
        intermediate_dim=intermediate_dim or scale_hidden_dim_for_mlp(embed_dim),
        max_seq_len=max_seq_len,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        attn_dropout=attn_dropout,
        rope_base=rope_base,
        norm_eps=norm_eps,
        rope_scaling=Llama3RopeScaling(factor=scale_factor),
    )
    return build(description, SPEC)


lora_llama3_1 = lora_builder(
    llama3_1, "lora_llama3_1", __name__, "a Llama 3.1 decoder with LoRA adapters from its numbers"
)
