"""Names of a reward model's weights: a language model's, with ``score`` in the place of the output projection."""

from torch import Tensor

from torchtune.models.convert_weights import hf_to_tune, tune_to_hf


def reward_hf_to_tune(
    state_dict: dict[str, Tensor],
    num_heads: int = 32,
    num_kv_heads: int = 32,
    dim: int = 4096,
    head_dim: int | None = None,
) -> dict[str, Tensor]:
    """Weights of a ``…ForSequenceClassification`` under Hugging Face names to ours; ``score.bias`` is left out."""
    weights = {name: tensor for name, tensor in state_dict.items() if name != "score.bias"}
    if "score.weight" in weights:
        weights["lm_head.weight"] = weights.pop("score.weight")
    return hf_to_tune(weights, num_heads, num_kv_heads, dim, head_dim)


def reward_tune_to_hf(
    state_dict: dict[str, Tensor], num_heads: int = 32, num_kv_heads: int = 32, dim: int = 4096
) -> dict[str, Tensor]:
    """The inverse of :func:`reward_hf_to_tune`."""
    weights = tune_to_hf(state_dict, num_heads, num_kv_heads, dim)
    if "lm_head.weight" in weights:
        weights["score.weight"] = weights.pop("lm_head.weight")
    return weights
