"""Sampling text from models."""

from torchtune.generation._generation import generate, generate_next_token, sample
from torchtune.generation._masks import get_causal_mask_from_padding_mask, get_position_ids_from_padding_mask
from torchtune.generation._stream import stream
from torchtune.generation._tokens import GeneratedTokens, TokenStep, generate_tokens, stream_tokens

__all__ = [
    "GeneratedTokens",
    "TokenStep",
    "generate",
    "generate_next_token",
    "generate_tokens",
    "get_causal_mask_from_padding_mask",
    "get_position_ids_from_padding_mask",
    "sample",
    "stream",
    "stream_tokens",
]
