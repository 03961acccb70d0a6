"""Qwen 2.5."""

from torchtune.models._family import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "Qwen2_5Tokenizer": "_tokenizer",
        "qwen2_5_tokenizer": "_tokenizer",
    },
)
