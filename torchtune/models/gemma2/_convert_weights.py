"""Compatibility: conversion of complete Gemma 2 state dicts; see :mod:`torchtune.models.convert_weights`."""

from dataclasses import replace

from torch import Tensor

from torchtune.models.convert_weights import convert_by, describe_state_dict
from torchtune.models.gemma2._model_builders import SPEC


def gemma2_hf_to_tune(
    state_dict: dict[str, Tensor],
    num_heads: int = 32,
    num_kv_heads: int = 32,
    dim: int = 4096,
    head_dim: int | None = None,
) -> dict[str, Tensor]:
    """Convert weights from Hugging Face names to ours."""
    description = describe_state_dict(state_dict, num_heads, num_kv_heads, dim, head_dim, True)
    return convert_by(SPEC.weight_map("hf"), state_dict, replace(description, norm_order="both"), to_tune=True)


def gemma2_tune_to_hf(
    state_dict: dict[str, Tensor],
    num_heads: int = 32,
    num_kv_heads: int = 32,
    dim: int = 4096,
    head_dim: int | None = None,
) -> dict[str, Tensor]:
    """Convert weights from our names to Hugging Face names."""
    description = describe_state_dict(state_dict, num_heads, num_kv_heads, dim, head_dim, True)
    return convert_by(SPEC.weight_map("hf"), state_dict, replace(description, norm_order="both"), to_tune=False)
