"""Compatibility: rotary positions of Llama 3.1, by their public name."""

from torchtune.modules.position_embeddings import ScaledRotaryPositionalEmbeddings as Llama3ScaledRoPE

__all__ = ["Llama3ScaledRoPE"]
