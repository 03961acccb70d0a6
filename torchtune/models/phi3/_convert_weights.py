"""Compatibility: whole Phi-3 state dicts renamed at once; see :mod:`torchtune.models.convert_weights`."""

from torch import Tensor

from torchtune.models.convert_weights import convert_by, describe_state_dict
from torchtune.models.phi3._model_builders import SPEC


def phi3_hf_to_tune(
    state_dict: dict[str, Tensor],
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    dim: int | None = None,
) -> dict[str, Tensor]:
    """Weights under Hugging Face names to ours; fused projections are taken apart.

    Args:
        state_dict: under Hugging Face names.
        num_heads: query heads; by default, and where it equals ``num_kv_heads``, the parts are of equal size.
        num_kv_heads: key and value heads.
        dim: width of the residual stream; by default it is read off the weights.
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
    """The inverse of :func:`phi3_hf_to_tune`."""
    description = describe_state_dict(state_dict, 1, 1, 2, biases=False)
    return convert_by(SPEC.weight_map(), state_dict, description, to_tune=False)
