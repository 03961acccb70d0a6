"""Learning rate schedules.

During a warmup of ``W`` steps, step ``i < W`` uses ``(i + 1) / (W + 1)`` of the full rate: the first step trains, and
step ``W`` is the first at the full rate. A warmup at least as long as the run is shortened to a tenth of the run, with
a warning.
"""

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from torchtune.utils import get_logger, log_rank_zero


class WarmupSchedule(LambdaLR):
    """Schedule that depends only on the step, so that a resumed run continues exactly.

    ``load_state_dict`` also sets the rates of the optimizer, whether or not its state was loaded before.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load ``state_dict``, and set the learning rates of the optimizer."""
        super().load_state_dict(state_dict)
        rates = []
        for base_rate, factor in zip(self.base_lrs, self.lr_lambdas, strict=True):
            rates.append(base_rate * factor(self.last_epoch))
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):  # in place: a compiled step has captured the tensor
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = rates


def _limit_warmup(num_warmup_steps: int, num_training_steps: int) -> int:
    """Return a warmup that is shorter than the run."""
    if num_warmup_steps < max(1, num_training_steps):
        return num_warmup_steps
    shorter = num_training_steps // 10
    log_rank_zero(
        get_logger(),
        f"num_warmup_steps: a warmup of {num_warmup_steps} steps is as long as the run's {num_training_steps} steps or "
        f"longer, and the full learning rate would not be reached: the run warms up for {shorter} steps instead; set "
        "lr_scheduler.num_warmup_steps to choose another number.",
        logging.WARNING,
    )
    return shorter


def _make_schedule(
    optimizer: torch.optim.Optimizer,
    num_warmup_steps: int,
    num_training_steps: int | None,
    decay: Callable[[float], float],
    last_epoch: int,
) -> WarmupSchedule:
    """Build a linear warmup followed by ``decay(progress)``, with progress from 0 to 1."""
    if num_training_steps is not None:
        num_warmup_steps = _limit_warmup(num_warmup_steps, num_training_steps)
    # Without a number of training steps the rate is constant, and the progress is not read.
    num_decay_steps = max(1, (num_training_steps or 1) - num_warmup_steps)

    def factor(step: int) -> float:
        """Return the part of the full rate at ``step``."""
        if step < num_warmup_steps:
            return (step + 1) / (num_warmup_steps + 1)
        progress = (step - num_warmup_steps) / num_decay_steps
        return max(0.0, decay(progress))

    return WarmupSchedule(optimizer, factor, last_epoch)


def get_cosine_schedule_with_warmup(
    optimizer: torch.optim.Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
) -> LambdaLR:
    """Warm up linearly, then follow a cosine: ``max(0, 0.5 * (1 + cos(pi * 2 * num_cycles * progress)))``.

    Args:
        optimizer: optimizer to schedule.
        num_warmup_steps: number of warmup steps.
        num_training_steps: number of steps of the run.
        num_cycles: cosine waves after the warmup; 0.5 decays from the full rate to 0.
        last_epoch: index of the last step when a run continues; -1 for a new run.

    Example:
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> schedule = torchtune.training.get_cosine_schedule_with_warmup(
        ...     optimizer, num_warmup_steps=2, num_training_steps=10
        ... )
        >>> optimizer.step(); schedule.step(); schedule.get_last_lr()
        [0.666...]
    """

    def decay(progress: float) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * 2.0 * num_cycles * progress))

    return _make_schedule(optimizer, num_warmup_steps, num_training_steps, decay, last_epoch)


def get_linear_schedule_with_warmup(
    optimizer: torch.optim.Optimizer, num_warmup_steps: int, num_training_steps: int, last_epoch: int = -1
) -> LambdaLR:
    """Warm up linearly, then decay linearly to 0 at the last step.

    Args:
        optimizer: optimizer to schedule.
        num_warmup_steps: number of warmup steps.
        num_training_steps: number of steps of the run.
        last_epoch: index of the last step when a run continues; -1 for a new run.

    Example:
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> schedule = torchtune.training.get_linear_schedule_with_warmup(
        ...     optimizer, num_warmup_steps=2, num_training_steps=10
        ... )
        >>> optimizer.step(); schedule.step(); schedule.get_last_lr()
        [0.666...]
    """
    return _make_schedule(optimizer, num_warmup_steps, num_training_steps, lambda progress: 1.0 - progress, last_epoch)


def get_constant_schedule_with_warmup(
    optimizer: torch.optim.Optimizer, num_warmup_steps: int, num_training_steps: int | None = None, last_epoch: int = -1
) -> LambdaLR:
    """Warm up linearly, then keep the full rate.

    Args:
        optimizer: optimizer to schedule.
        num_warmup_steps: number of warmup steps.
        num_training_steps: number of steps of the run, only used to shorten the warmup.
        last_epoch: index of the last step when a run continues; -1 for a new run.

    Example:
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> schedule = torchtune.training.get_constant_schedule_with_warmup(optimizer, num_warmup_steps=2)
        >>> optimizer.step(); schedule.step(); schedule.get_last_lr()
        [0.666...]
    """
    return _make_schedule(optimizer, num_warmup_steps, num_training_steps, lambda _: 1.0, last_epoch)


def get_lr(optimizer: torch.optim.Optimizer) -> float:
    """Return the learning rate of an optimizer's first parameter group.

    Groups may have different rates (say, matrices and norms), but a schedule scales all of them alike.

    Example:
        >>> torchtune.training.get_lr(torch.optim.SGD(model.parameters(), lr=0.5))
        0.5
    """
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:  # a wrapper of one optimizer per parameter
        groups = next(iter(optimizer.optim_map.values())).param_groups
    return float(groups[0]["lr"])
