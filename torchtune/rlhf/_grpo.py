"""Loss and settings of the recipes that train on groups of sampled answers."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from torchtune.rlhf._rollouts import RolloutError
from torchtune.rlhf.loss._base import setup_loss
from torchtune.rlhf.loss.grpo import GRPOLoss


def setup_policy_loss(loss: Any, model: nn.Module, sampler: Any) -> GRPOLoss:
    """Prepare a GRPO loss for a model and for the temperature of a sampler.

    Raises:
        RolloutError: the loss is not a GRPO loss, or needs log-probs that the sampler does not return.
        LossError: the model's output does not fit the loss.
    """
    if not isinstance(loss, GRPOLoss):
        raise RolloutError(
            f"loss: {type(loss).__name__} takes no sampled answers: give one of the GRPO family, for example "
            "torchtune.rlhf.loss.GRPOLoss."
        )
    if loss.importance_cap is not None and not getattr(sampler, "gives_log_probs", True):
        raise RolloutError(
            f"loss.importance_cap is {loss.importance_cap:g}, and the sampler gives no log-probs to weigh tokens by: "
            "leave it out, or sample from a server that gives them."
        )
    setup_loss(loss, model)
    loss.temperature = sampler.temperature
    return loss


def check_rollout_settings(settings: Any) -> Iterator[tuple[str, str]]:
    """Yield (setting, error and remedy) for invalid settings of a recipe that samples."""
    distills = "Distillation" in str(settings.loss.get("_component_"))
    if getattr(settings, "context_parallel_dim", 1) > 1:
        yield "context_parallel_dim", "is above 1, but parts of a sequence cannot generate: set it to 1"
    if distills and settings.ref_checkpointer is None:
        yield "ref_checkpointer", "is null, so the model would be its own teacher: name the teacher's checkpoint"
    if settings.ref_model is not None and settings.ref_checkpointer is None:
        yield "ref_model", "needs the checkpoint of that model: set ref_checkpointer"
    if not settings.rewards and not distills and settings.environment is None:
        yield "rewards", "is empty: name what scores an answer, for example torchtune.rlhf.reward_functions.ExactMatch"
    if settings.num_samples < 2 and not distills:
        yield "num_samples", "is 1: answers are compared with the others to their prompt, so set it to 2 or more"
