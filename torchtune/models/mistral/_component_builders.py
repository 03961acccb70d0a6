"""Mistral from its numbers."""

from torchtune.models._build import build
from torchtune.models._builders import from_numbers, lora_builder
from torchtune.models._classifiers import classifier_builder
from torchtune.models._description import Description
from torchtune.models.mistral._model_builders import SPEC
from torchtune.modules.transformer import TransformerDecoder


@from_numbers
def mistral(
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
    """Build a decoder of the Mistral family from its numbers."""
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
        norm_eps=norm_eps,
    )
    return build(description, SPEC)


lora_mistral = lora_builder(mistral, "lora_mistral", __name__, "a Mistral decoder with LoRA adapters from its numbers")
mistral_classifier = classifier_builder(mistral, "mistral_classifier", __name__)
lora_mistral_classifier = classifier_builder(lora_mistral, "lora_mistral_classifier", __name__)
