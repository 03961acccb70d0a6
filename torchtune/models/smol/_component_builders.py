"""SmolLM 2 from its numbers."""

from torchtune.models._build import build
from torchtune.models._builders import from_numbers
from torchtune.models._description import Description
from torchtune.models._rope_scaling import Llama3RopeScaling
from torchtune.models.smol._model_builders import SPEC
from torchtune.modules.transformer import TransformerDecoder


@from_numbers
def smollm2(
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    embed_dim: int,
    intermediate_dim: int,
    max_seq_len: int = 8192,
    vocab_size: int = 49_152,
    attn_dropout: float = 0.0,
    rope_base: float = 100_000,
    norm_eps: float = 1e-5,
    scale_factor: float | None = None,
    tie_word_embeddings: bool = True,
) -> TransformerDecoder:
    """Build a decoder of the SmolLM 2 family from its numbers."""
    description = Description(
        vocab_size=vocab_size,
        num_layers=num_layers,
        embed_dim=embed_dim,
        intermediate_dim=intermediate_dim,
        max_seq_len=max_seq_len,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        attn_dropout=attn_dropout,
        rope_base=rope_base,
        rope_scaling=None if scale_factor is None else Llama3RopeScaling(factor=scale_factor),
        norm_eps=norm_eps,
        tie_word_embeddings=tie_word_embeddings,
    )
    return build(description, SPEC)
