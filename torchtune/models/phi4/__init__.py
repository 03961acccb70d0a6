"""Phi-4."""

from torchtune.models._family import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "Phi4Tokenizer": "_tokenizer",
        "phi4_tokenizer": "_tokenizer",
    },
)
