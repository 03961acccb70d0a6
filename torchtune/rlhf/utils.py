"""Weight names of reward models: the names of a language model, with ``score`` as the output projection."""

from torch import Tensor

from torchtune._lazy import former_package
from torchtune.models.convert_weights import hf_to_tune, tune_to_hf


def reward_hf_to_tune(
    state_dict: dict[str, Tensor],
    num_heads: int = 32,
    num_kv_heads: int = 32,
    dim: int = 4096,
    head_dim: int | None = None,
) -> dict[str, Tensor]:
    """Convert weights of a Hugging Face ``…ForSequenceClassification`` to torchtune names; drop ``score.bias``."""
    weights = {name: tensor for name, tensor in state_dict.items() if name != "score.bias"}
    if "score.weight" in weights:
        weights["lm_head.weight"] = weights.pop("score.weight")
    return hf_to_tune(weights, num_heads, num_kv_heads, dim, head_dim)


def reward_tune_to_hf(
    state_dict: dict[str, Tensor], num_heads: int = 32, num_kv_heads: int = 32, dim: int = 4096
) -> dict[str, Tensor]:
    """Convert weights from torchtune names to Hugging Face names; the inverse of :func:`reward_hf_to_tune`."""
    weights = tune_to_hf(state_dict, num_heads, num_kv_heads, dim)
    if "lm_head.weight" in weights:
        weights["score.weight"] = weights.pop("lm_head.weight")
    return weights


__all__ = ["reward_hf_to_tune", "reward_tune_to_hf"]
__getattr__, __path__ = former_package(__name__)
