"""Qwen 2 from its numbers."""

from torchtune.models._build import build
from torchtune.models._builders import from_numbers, lora_builder
from torchtune.models._description import Description, ModelError
from torchtune.models.qwen2._model_builders import SPEC
from torchtune.modules.transformer import TransformerDecoder


@from_numbers
def qwen2(
    vocab_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    embed_dim: int,
    intermediate_dim: int,
    max_seq_len: int,
    head_dim: int | None = None,
    attn_dropout: float = 0.0,
    norm_eps: float = 1e-5,
    rope_base: float = 1_000_000.0,
    tie_word_embeddings: bool = False,
    q_proj_bias: bool = True,
    k_proj_bias: bool = True,
    v_proj_bias: bool = True,
    q_norm: bool = False,
    k_norm: bool = False,
) -> TransformerDecoder:
    """Build a decoder of the Qwen 2 family from its numbers.

    Raises:
        ModelError: only one of ``q_norm`` and ``k_norm``.
    """
    if q_norm != k_norm:
        raise ModelError("q_norm and k_norm must be given together.")
    description = Description(
        vocab_size=vocab_size,
        num_layers=num_layers,
        embed_dim=embed_dim,
        intermediate_dim=intermediate_dim,
        max_seq_len=max_seq_len,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim or 0,
        attn_dropout=attn_dropout,
        q_bias=q_proj_bias,
        k_bias=k_proj_bias,
        v_bias=v_proj_bias,
        qk_norm="after_rope" if q_norm else "none",
        rope_base=rope_base,
        rope_layout="half",
        norm_eps=norm_eps,
        tie_word_embeddings=tie_word_embeddings,
    )
    return build(description, SPEC)


lora_qwen2 = lora_builder(qwen2, "lora_qwen2", __name__, "a Qwen 2 decoder with LoRA adapters from its numbers")
