"""Qwen 3, the dense models."""

from torchtune.models._family import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "Qwen3Tokenizer": "_tokenizer",
        "qwen3_tokenizer": "_tokenizer",
    },
)
