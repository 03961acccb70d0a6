"""Compatibility: conversion of complete Qwen state dicts; see :mod:`torchtune.models.convert_weights`."""

from torch import Tensor

from torchtune.models._weight_names import HF_HALF
from torchtune.models.convert_weights import convert_by, describe_state_dict

QWEN2_TIED_KEY = "lm_head.weight"


def qwen2_hf_to_tune(
    state_dict: dict[str, Tensor],
    num_heads: int = 32,
    num_kv_heads: int = 32,
    dim: int = 4096,
    head_dim: int | None = None,
    tie_word_embeddings: bool = False,
) -> dict[str, Tensor]:
    """Convert weights from Hugging Face names to ours, without a tied ``lm_head.weight``."""
    description = describe_state_dict(state_dict, num_heads, num_kv_heads, dim, head_dim, tie_word_embeddings)
    return convert_by(HF_HALF, state_dict, description, to_tune=True)


def qwen2_tune_to_hf(
    state_dict: dict[str, Tensor],
    num_heads: int = 32,
    num_kv_heads: int = 32,
    dim: int = 4096,
    head_dim: int | None = None,
    tie_word_embeddings: bool = False,
) -> dict[str, Tensor]:
    """Convert weights from our names to Hugging Face names, without a tied ``lm_head.weight``."""
    description = describe_state_dict(state_dict, num_heads, num_kv_heads, dim, head_dim, tie_word_embeddings)
    return convert_by(HF_HALF, state_dict, description, to_tune=False)
