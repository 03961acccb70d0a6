"""Phi-3."""

from torchtune.models._family import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "Phi3RotaryPositionalEmbeddings": "_position_embeddings",
        "phi3_hf_to_tune": "_convert_weights",
        "phi3_tune_to_hf": "_convert_weights",
        "Phi3MiniTokenizer": "_tokenizer",
        "phi3_mini_tokenizer": "_tokenizer",
    },
)
