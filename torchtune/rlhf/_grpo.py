"""Group-relative advantages of GRPO, and checks of its loss and settings."""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchtune.rlhf._rollouts import RolloutError
from torchtune.rlhf.loss._base import setup_loss
from torchtune.rlhf.loss.grpo import GRPOLoss
from torchtune.training import ParallelDims


class GroupAdvantages:
    """Advantages of answers to the same prompt: the reward minus the group's mean.

    Args:
        leave_one_out: subtract the mean of the *other* answers, which scales the advantage by g / (g − 1) (RLOO).
        scale: divide by the standard deviation of the ``group`` (original GRPO; favors prompts that are nearly always
            or nearly never solved), or of all rewards in the step (``batch``). None does not divide.

    Example:
        >>> torchtune.rlhf.GroupAdvantages(leave_one_out=True).leave_one_out
        True
    """

    def __init__(self, leave_one_out: bool = False, scale: Literal["group", "batch"] | None = None) -> None:
        if scale not in ("group", "batch", None):
            raise ValueError(f"scale is {scale!r}: it must be group, batch or null.")
        self.leave_one_out = leave_one_out
        self.scale = scale

    def __call__(self, rewards: Tensor, dims: ParallelDims | None = None) -> Tensor:
        """Compute advantages.

        Args:
            rewards: ``[n, g]``, n prompts with g answers each; NaN rewards are ignored.
            dims: parallel dims; ``scale: batch`` uses the standard deviation over all ranks.

        Returns:
            ``[n, g]`` in the dtype of the rewards; 0 in groups without variance, NaN for NaN rewards.
        """
        has_reward = ~rewards.isnan()  # [n, g]
        counts = has_reward.sum(1, keepdim=True)  # [n, 1]
        num_others = (counts - 1).clamp(min=1)  # [n, 1], also the divisor of an unbiased variance
        centered = rewards - rewards.nansum(1, keepdim=True) / counts.clamp(min=1)
        advantages = centered
        if self.leave_one_out:
            advantages = centered * counts / num_others
        # The constant keeps groups whose rewards hardly differ from dominating the step.
        if self.scale == "group":
            variance = centered.square().nansum(1, keepdim=True) / num_others
            advantages = advantages / (variance.sqrt() + 1e-4)
        elif self.scale == "batch":
            advantages = advantages / (_std(rewards[has_reward], dims) + 1e-4)
        # Rounding of the mean leaves tiny advantages where all rewards are equal, which a scale would enlarge.
        return torch.where(has_reward & ~has_variance(rewards)[:, None], 0.0, advantages)


def has_variance(rewards: Tensor) -> Tensor:
    """Return whether the rewards of each group differ, bool ``[n]``; see :class:`GroupAdvantages`.

    Example:
        >>> torchtune.rlhf.has_variance(torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
        tensor([ True, False])
    """
    lowest = rewards.nan_to_num(nan=float("inf")).amin(1)
    highest = rewards.nan_to_num(nan=float("-inf")).amax(1)
    return highest > lowest


def _std(values: Tensor, dims: ParallelDims | None) -> float:
    """Compute the standard deviation over the values of all ranks; all ranks must call it."""
    total = values.sum().item()
    total_of_squares = values.square().sum().item()
    count = float(len(values))
    if dims is not None:
        (total, total_of_squares, count), _ = dims.exchange([total, total_of_squares, count])
    mean = total / max(count, 1)
    # Rounding can make the sum of squared deviations negative.
    squared_deviations = max(total_of_squares - count * mean * mean, 0.0)
    return squared_deviations**0.5 / max(count - 1, 1) ** 0.5


def make_advantages(component: GroupAdvantages | None) -> GroupAdvantages:
    """Check and return the advantages component of a config, by default :class:`GroupAdvantages`.

    Raises:
        RolloutError: a test call fails or returns a wrong shape.
    """
    if component is None:
        return GroupAdvantages()
    name = type(component).__name__
    expected = "it is called with rewards [prompts, answers] and the processes, as torchtune.rlhf.GroupAdvantages is."
    rewards = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    try:
        advantages = component(rewards, ParallelDims())
    except Exception as error:  # noqa: BLE001 - raised by a user's component
        reason = f"{type(error).__name__}: {error}".rstrip(".")
        raise RolloutError(f"advantages: {name} fails: {reason}; {expected}") from None
    if getattr(advantages, "shape", None) != rewards.shape:
        raise RolloutError(f"advantages: {name} returns no advantage for each reward; {expected}")
    return component


def setup_policy_loss(loss: Any, model: nn.Module, sampler: Any) -> GRPOLoss:
    """Prepare a GRPO loss for a model and for the temperature of a sampler.

    Raises:
        RolloutError: the loss is not a GRPO loss, or needs log-probs that the sampler does not return.
        LossError: the model's output does not fit the loss.
    """
    if not isinstance(loss, GRPOLoss):
        raise RolloutError(
            f"loss: {type(loss).__name__} does not train on sampled answers: give one of the GRPO family, for example "
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
