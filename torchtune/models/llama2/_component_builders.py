"""Llama 2 from its numbers."""

from torchtune.models._build import build
from torchtune.models._builders import from_numbers, lora_builder, scale_hidden_dim_for_mlp
from torchtune.models._classifiers import classifier_builder
from torchtune.models._description import Description
from torchtune.models.llama2._model_builders import SPEC
from torchtune.modules.transformer import TransformerDecoder


@from_numbers
def llama2(
    vocab_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    embed_dim: int,
    max_seq_len: int,
    attn_dropout: float = 0.0,
    intermediate_dim: int | None = None,
    norm_eps: float = 1e-5,
    rope_base: float = 10_000.0,
) -> TransformerDecoder:
    """Build a decoder of the Llama 2 family from its numbers."""
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
    )
    return build(description, SPEC)


lora_llama2 = lora_builder(llama2, "lora_llama2", __name__, "a Llama 2 decoder with LoRA adapters from its numbers")
llama2_classifier = classifier_builder(llama2, "llama2_classifier", __name__)
lora_llama2_classifier = classifier_builder(lora_llama2, "lora_llama2_classifier", __name__)
