"""How much better than the others of its group an answer is."""

from typing import Literal

import torch
from torch import Tensor

from torchtune.training import ParallelDims


class GroupAdvantages:
    """Advantages of answers to the same prompt: the reward minus what the group gets on average.

    Args:
        leave_one_out: compare with the mean of the *other* answers, which is g / (g − 1) times as much (RLOO).
        scale: divide by the standard deviation of the ``group`` (the first GRPO: favours prompts that are nearly
            always, or nearly never, solved), or by that of all rewards of the step (``batch``). By default neither.

    Example:
        >>> torchtune.rlhf.GroupAdvantages(leave_one_out=True).leave_one_out
        True
    """

    def __init__(self, leave_one_out: bool = False, scale: Literal["group", "batch"] | None = None) -> None:
        if scale not in ("group", "batch", None):
            raise ValueError(f"scale is {scale!r}: it must be group, batch or null.")
        self.leave_one_out, self.scale = leave_one_out, scale

    def __call__(self, rewards: Tensor, dims: ParallelDims | None = None) -> Tensor:
        """Compute advantages.

        Args:
            rewards: ``[n, g]``, n prompts with g answers each; NaN where there is none, which counts nowhere.
            dims: the processes, over which ``scale: batch`` takes the standard deviation.

        Returns:
            ``[n, g]`` in the dtype of the rewards; 0 where the group has no variance, NaN where there is no reward.
        """
        known = ~rewards.isnan()
        counts = known.sum(1, keepdim=True)
        centred = rewards - rewards.nansum(1, keepdim=True) / counts.clamp(min=1)
        advantages = centred * counts / (counts - 1).clamp(min=1) if self.leave_one_out else centred
        if self.scale == "group":
            variance = centred.square().nansum(1, keepdim=True) / (counts - 1).clamp(min=1)
            advantages = advantages / (variance.sqrt() + 1e-4)
        elif self.scale == "batch":
            advantages = advantages / (_std(rewards[known], dims) + 1e-4)
        return torch.where(known & ~has_variance(rewards)[:, None], 0.0, advantages)


def has_variance(rewards: Tensor) -> Tensor:
    """Whether the rewards of a group differ, bool ``[n]``; see :class:`GroupAdvantages`.

    Example:
        >>> torchtune.rlhf.has_variance(torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
        tensor([ True, False])
    """
    lowest = rewards.nan_to_num(nan=float("inf")).amin(1)
    highest = rewards.nan_to_num(nan=float("-inf")).amax(1)
    return highest > lowest


def _std(values: Tensor, dims: ParallelDims | None) -> float:
    """Standard deviation of the values of all processes, which call it together."""
    sums = [values.sum().item(), values.square().sum().item(), float(len(values))]
    total, squares, count = sums if dims is None else dims.exchange(sums)[0]
    mean = total / max(count, 1)
    return max(squares - count * mean * mean, 0.0) ** 0.5 / max(count - 1, 1) ** 0.5
