"""Sampling text from models."""

from torchtune.generation._generation import generate, generate_next_token, sample
from torchtune.generation._masks import get_causal_mask_from_padding_mask, get_position_ids_from_padding_mask
from torchtune.generation._stream import stream

__all__ = [
    "generate",
    "generate_next_token",
    "get_causal_mask_from_padding_mask",
    "get_position_ids_from_padding_mask",
    "sample",
    "stream",
]
