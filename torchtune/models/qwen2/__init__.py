"""Qwen 2."""

from torchtune.models._family import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "Qwen2Tokenizer": "_tokenizer",
        "qwen2_tokenizer": "_tokenizer",
        "Qwen2RotaryPositionalEmbeddings": "_positional_embeddings",
        "qwen2_hf_to_tune": "_convert_weights",
        "qwen2_tune_to_hf": "_convert_weights",
    },
)
