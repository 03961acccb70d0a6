"""Compatibility: conversion of complete Phi-3 state dicts; see :mod:`torchtune.models.convert_weights`."""

from torch import Tensor

from torchtune.models.convert_weights import convert_by, describe_state_dict
from torchtune.models.phi3._model_builders import SPEC


def phi3_hf_to_tune(
    state_dict: dict[str, Tensor],
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    dim: int | None = None,
) -> dict[str, Tensor]:
    """Convert weights from Hugging Face names to ours, splitting fused projections.

    Args:
        state_dict: state dict with Hugging Face names.
        num_heads: number of query heads; by default queries, keys and values have equal sizes.
        num_kv_heads: number of key and value heads; by default ``num_heads``.
        dim: width of the residual stream; by default that of the weights.
    """
    fused = next((tensor for name, tensor in state_dict.items() if name.endswith("gate_up_proj.weight")), None)
    width = dim or (4096 if fused is None else fused.shape[1])
    heads = num_heads or 1
    hidden = 2 if fused is None else fused.shape[0]
    description = describe_state_dict(
        state_dict, heads, num_kv_heads or heads, width, intermediate_dim=hidden // 2, biases=False
    )
    return convert_by(SPEC.weight_map(), state_dict, description, to_tune=True)


def phi3_tune_to_hf(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert weights from our names to Hugging Face names; the inverse of :func:`phi3_hf_to_tune`."""
    description = describe_state_dict(state_dict, 1, 1, 2, biases=False)
    return convert_by(SPEC.weight_map(), state_dict, description, to_tune=False)
