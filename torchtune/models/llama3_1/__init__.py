"""Llama 3.1."""

from torchtune.models._family import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "Llama3ScaledRoPE": "_position_embeddings",
    },
)
