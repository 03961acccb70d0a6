"""Compatibility: public name of Llama 3.1's rotary embeddings."""

from torchtune.modules.position_embeddings import ScaledRotaryPositionalEmbeddings as Llama3ScaledRoPE

__all__ = ["Llama3ScaledRoPE"]
