"""Learning rate schedules.

During a warmup of ``W`` steps, step ``i < W`` uses ``(i + 1) / (W + 1)`` of the full rate: the first step trains, and
step ``W`` is the first at the full rate. A warmup at least as long as the run is shortened to a tenth of the run, with
a warning. ``warmup_ratio`` gives the warmup as a part of the run instead: of ``N`` steps, ``ceil(warmup_ratio * N)``.

The schedules have the formulas of those of the same name in ``transformers``, where the first step of a warmup has the
rate 0: a warmup of ``W`` steps here is one of ``W + 1`` steps there without that step.
"""

import logging
import math
from collections.abc import Callable
from typing import Any, Literal

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


def _check_floor(name: str, value: float) -> float:
    """Return a lowest part of the full rate. Raises ``ValueError`` if it is not from 0 to 1."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is {value}: it is a part of the full learning rate, from 0 to 1.")
    return value


class _Warmup:
    """The warmup of a schedule, and the run that follows it.

    Args:
        num_warmup_steps: steps of the warmup, shortened to a tenth of a run that is not longer.
        warmup_ratio: part of the run instead of a number.
        num_training_steps: steps of the run; None if the rate after the warmup does not depend on it.
        floor: part of the full rate from which the warmup rises.

    Raises:
        ValueError: both a number and a ratio are given, the ratio is not from 0 to below 1, or it is given without the
            run's number of steps.
    """

    def __init__(
        self,
        num_warmup_steps: int,
        warmup_ratio: float | None,
        num_training_steps: int | None,
        floor: float = 0.0,
    ) -> None:
        self.num_steps = num_warmup_steps
        if warmup_ratio is not None:
            if num_warmup_steps:
                raise ValueError(
                    f"num_warmup_steps is {num_warmup_steps} and warmup_ratio {warmup_ratio}: set one of the two."
                )
            if not 0 <= warmup_ratio < 1:
                raise ValueError(f"warmup_ratio is {warmup_ratio}: it is a part of the run, from 0 to below 1.")
            if num_training_steps is None:
                raise ValueError("warmup_ratio is a part of the run: give num_training_steps, the steps of the run.")
            self.num_steps = math.ceil(warmup_ratio * num_training_steps)
        # A run of 0 steps without a warmup is no mistake.
        if num_training_steps is not None and self.num_steps >= max(1, num_training_steps):
            shorter_warmup = num_training_steps // 10
            log_rank_zero(
                get_logger(),
                f"num_warmup_steps: a warmup of {self.num_steps} steps is as long as the run's {num_training_steps} "
                f"steps or longer, and the full learning rate would not be reached: the run warms up for "
                f"{shorter_warmup} steps instead; set lr_scheduler.num_warmup_steps to choose another number.",
                logging.WARNING,
            )
            self.num_steps = shorter_warmup
        self.floor = floor

    def then(
        self, factor_after: Callable[[int], float], optimizer: torch.optim.Optimizer, last_epoch: int
    ) -> WarmupSchedule:
        """Build the schedule: a linear warmup, then ``factor_after(steps since the end of the warmup)``."""

        def factor(step: int) -> float:
            """Return the part of the full rate at ``step``."""
            if step < self.num_steps:
                progress = (step + 1) / (self.num_steps + 1)
                return self.floor + (1.0 - self.floor) * progress
            return max(0.0, factor_after(step - self.num_steps))

        return WarmupSchedule(optimizer, factor, last_epoch)


def _require_steps(num_training_steps: int | None) -> int:
    """Return the steps of the run. Raises ``ValueError`` if they are not given."""
    if num_training_steps is None:
        raise ValueError("num_training_steps is not given: the learning rate decays over the steps of the run.")
    return num_training_steps


# Form of a decay -> part of the way from the full rate to the lowest one that is left at ``progress`` from 0 to 1.
_DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "1-sqrt": lambda progress: 1.0 - math.sqrt(progress),
}


def get_cosine_schedule_with_warmup(
    optimizer: torch.optim.Optimizer,
    num_warmup_steps: int = 0,
    num_training_steps: int | None = None,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
    *,
    warmup_ratio: float | None = None,
    min_lr_ratio: float = 0.0,
) -> LambdaLR:
    """Warm up linearly, then follow a cosine: ``max(0, 0.5 * (1 + cos(pi * 2 * num_cycles * progress)))``.

    With a floor ``m = min_lr_ratio``, the factor ``f`` becomes ``m + (1 - m) * f``, as in the schedule
    ``cosine_with_min_lr`` of ``transformers``.

    Args:
        optimizer: optimizer to schedule.
        num_warmup_steps: number of warmup steps.
        num_training_steps: number of steps of the run; recipes pass it.
        num_cycles: cosine waves after the warmup; 0.5 decays from the full rate to the floor.
        last_epoch: index of the last step when a run continues; -1 for a new run.
        warmup_ratio: warmup as a part of the run, instead of ``num_warmup_steps``.
        min_lr_ratio: lowest rate, as a part of the full rate.

    Raises:
        ValueError: the number of steps is missing, or a ratio is out of its range.

    Example:
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> schedule = torchtune.training.get_cosine_schedule_with_warmup(
        ...     optimizer, num_warmup_steps=2, num_training_steps=10
        ... )
        >>> optimizer.step(); schedule.step(); schedule.get_last_lr()
        [0.666...]
    """
    num_training_steps = _require_steps(num_training_steps)
    floor = _check_floor("min_lr_ratio", min_lr_ratio)
    warmup = _Warmup(num_warmup_steps, warmup_ratio, num_training_steps)
    num_decay_steps = max(1, num_training_steps - warmup.num_steps)

    def decay(step: int) -> float:
        progress = step / num_decay_steps
        angle = math.pi * 2.0 * num_cycles * progress
        return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(angle))

    return warmup.then(decay, optimizer, last_epoch)


def get_linear_schedule_with_warmup(
    optimizer: torch.optim.Optimizer,
    num_warmup_steps: int = 0,
    num_training_steps: int | None = None,
    last_epoch: int = -1,
    *,
    warmup_ratio: float | None = None,
) -> LambdaLR:
    """Warm up linearly, then decay linearly to 0 at the last step.

    Args:
        optimizer: optimizer to schedule.
        num_warmup_steps: number of warmup steps.
        num_training_steps: number of steps of the run; recipes pass it.
        last_epoch: index of the last step when a run continues; -1 for a new run.
        warmup_ratio: warmup as a part of the run, instead of ``num_warmup_steps``.

    Raises:
        ValueError: the number of steps is missing, or the ratio is out of its range.

    Example:
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> schedule = torchtune.training.get_linear_schedule_with_warmup(
        ...     optimizer, warmup_ratio=0.2, num_training_steps=10
        ... )
        >>> optimizer.step(); schedule.step(); schedule.get_last_lr()
        [0.666...]
    """
    num_training_steps = _require_steps(num_training_steps)
    warmup = _Warmup(num_warmup_steps, warmup_ratio, num_training_steps)
    num_decay_steps = max(1, num_training_steps - warmup.num_steps)
    return warmup.then(lambda step: 1.0 - step / num_decay_steps, optimizer, last_epoch)


def get_constant_schedule_with_warmup(
    optimizer: torch.optim.Optimizer,
    num_warmup_steps: int = 0,
    num_training_steps: int | None = None,
    last_epoch: int = -1,
    *,
    warmup_ratio: float | None = None,
) -> LambdaLR:
    """Warm up linearly, then keep the full rate.

    Args:
        optimizer: optimizer to schedule.
        num_warmup_steps: number of warmup steps.
        num_training_steps: number of steps of the run, only used to shorten the warmup, or for ``warmup_ratio``.
        last_epoch: index of the last step when a run continues; -1 for a new run.
        warmup_ratio: warmup as a part of the run, instead of ``num_warmup_steps``.

    Raises:
        ValueError: the ratio is out of its range, or the number of steps is missing beside it.

    Example:
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> schedule = torchtune.training.get_constant_schedule_with_warmup(optimizer, num_warmup_steps=2)
        >>> optimizer.step(); schedule.step(); schedule.get_last_lr()
        [0.666...]
    """
    return _Warmup(num_warmup_steps, warmup_ratio, num_training_steps).then(lambda _: 1.0, optimizer, last_epoch)


def get_wsd_schedule(
    optimizer: torch.optim.Optimizer,
    num_warmup_steps: int = 0,
    num_decay_steps: int | None = None,
    num_training_steps: int | None = None,
    decay_type: Literal["linear", "cosine", "1-sqrt"] = "cosine",
    min_lr_ratio: float = 0.0,
    last_epoch: int = -1,
    *,
    warmup_ratio: float | None = None,
    decay_ratio: float | None = None,
) -> LambdaLR:
    """Warm up linearly, keep the full rate, and decay at the end of the run (warmup-stable-decay, arXiv:2404.06395).

    A checkpoint of the stable phase can be trained further with another number of steps.

    Args:
        optimizer: optimizer to schedule.
        num_warmup_steps: number of warmup steps, from ``min_lr_ratio`` of the full rate.
        num_decay_steps: number of steps of the decay at the end; by default a tenth of the run.
        num_training_steps: number of steps of the run; recipes pass it.
        decay_type: form of the decay: ``1 - p``, ``0.5 * (1 + cos(pi * p))`` or ``1 - sqrt(p)``, with the progress
            ``p`` from 0 to 1.
        min_lr_ratio: lowest rate, as a part of the full rate.
        last_epoch: index of the last step when a run continues; -1 for a new run.
        warmup_ratio: warmup as a part of the run, instead of ``num_warmup_steps``.
        decay_ratio: decay as a part of the run, instead of ``num_decay_steps``.

    Raises:
        ValueError: the number of steps is missing, the phases are longer than the run, both ways give a phase, the form
            is unknown, or a ratio is out of its range.

    Example:
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> schedule = torchtune.training.get_wsd_schedule(
        ...     optimizer, num_decay_steps=2, num_training_steps=4, decay_type="linear"
        ... )
        >>> rates = []
        >>> for _ in range(4):
        ...     rates += schedule.get_last_lr()
        ...     optimizer.step(); schedule.step()
        ...
        >>> rates
        [1.0, 1.0, 1.0, 0.5]
    """
    num_training_steps = _require_steps(num_training_steps)
    floor = _check_floor("min_lr_ratio", min_lr_ratio)
    if decay_type not in _DECAYS:
        raise ValueError(f"decay_type is {decay_type!r}: it must be one of {', '.join(_DECAYS)}.")
    if num_decay_steps is not None and decay_ratio is not None:
        raise ValueError(f"num_decay_steps is {num_decay_steps} and decay_ratio {decay_ratio}: set one of the two.")
    if decay_ratio is not None and not 0 <= decay_ratio <= 1:
        raise ValueError(f"decay_ratio is {decay_ratio}: it is a part of the run, from 0 to 1.")
    warmup = _Warmup(num_warmup_steps, warmup_ratio, num_training_steps, floor)
    num_steps_after_warmup = num_training_steps - warmup.num_steps
    if num_decay_steps is None:
        if decay_ratio is None:
            decay_ratio = 0.1
        num_decay_steps = math.ceil(decay_ratio * num_training_steps)
    if not 0 <= num_decay_steps <= num_steps_after_warmup:
        raise ValueError(
            f"the decay has {num_decay_steps} steps (num_decay_steps, or decay_ratio), but the run has "
            f"{num_training_steps} steps, and {warmup.num_steps} of them are the warmup: set the decay to at most "
            f"{num_steps_after_warmup} steps."
        )
    num_stable_steps = num_steps_after_warmup - num_decay_steps
    decay = _DECAYS[decay_type]

    def stable_then_decay(step: int) -> float:
        if step < num_stable_steps:
            return 1.0
        # After the run's last step. With a decay of 0 steps, this keeps the progress below from a division by 0.
        if step >= num_steps_after_warmup:
            return floor
        progress = (step - num_stable_steps) / num_decay_steps
        return floor + (1.0 - floor) * decay(progress)

    return warmup.then(stable_then_decay, optimizer, last_epoch)


def get_inverse_sqrt_schedule(
    optimizer: torch.optim.Optimizer,
    num_warmup_steps: int = 0,
    timescale: int | None = None,
    num_training_steps: int | None = None,
    last_epoch: int = -1,
    *,
    warmup_ratio: float | None = None,
) -> LambdaLR:
    """Warm up linearly, then decay as ``1 / sqrt(1 + steps / timescale)``, with the steps since the warmup.

    Args:
        optimizer: optimizer to schedule.
        num_warmup_steps: number of warmup steps.
        timescale: steps after the warmup until the rate is ``1 / sqrt(2)`` of the full one; by default the length of
            the warmup, or 10,000 without a warmup.
        num_training_steps: number of steps of the run, only used to shorten the warmup, or for ``warmup_ratio``.
        last_epoch: index of the last step when a run continues; -1 for a new run.
        warmup_ratio: warmup as a part of the run, instead of ``num_warmup_steps``.

    Raises:
        ValueError: the timescale is not positive, the ratio is out of its range, or the number of steps is missing
            beside it.

    Example:
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> schedule = torchtune.training.get_inverse_sqrt_schedule(optimizer, timescale=1)
        >>> optimizer.step(); schedule.step(); schedule.get_last_lr()
        [0.707...]
    """
    warmup = _Warmup(num_warmup_steps, warmup_ratio, num_training_steps)
    if timescale is None:
        timescale = warmup.num_steps or 10_000
    if timescale <= 0:
        raise ValueError(f"timescale is {timescale}: it is a number of steps, and must be above 0.")
    return warmup.then(lambda step: 1.0 / math.sqrt(1.0 + step / timescale), optimizer, last_epoch)


def get_polynomial_decay_schedule_with_warmup(
    optimizer: torch.optim.Optimizer,
    num_warmup_steps: int = 0,
    num_training_steps: int | None = None,
    lr_end: float = 1e-7,
    power: float = 1.0,
    last_epoch: int = -1,
    *,
    warmup_ratio: float | None = None,
) -> LambdaLR:
    """Warm up linearly, then decay as ``(1 - progress) ** power`` from the full rate to ``lr_end``.

    Args:
        optimizer: optimizer to schedule.
        num_warmup_steps: number of warmup steps.
        num_training_steps: number of steps of the run; recipes pass it.
        lr_end: learning rate at the end. Groups of parameters with other rates decay to the same part of their rates.
        power: power of the decay; 1 is linear.
        last_epoch: index of the last step when a run continues; -1 for a new run.
        warmup_ratio: warmup as a part of the run, instead of ``num_warmup_steps``.

    Raises:
        ValueError: the number of steps is missing, ``lr_end`` is not below the optimizer's rate, or the ratio is out of
            its range.

    Example:
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> schedule = torchtune.training.get_polynomial_decay_schedule_with_warmup(
        ...     optimizer, num_training_steps=2, lr_end=0.0, power=2.0
        ... )
        >>> optimizer.step(); schedule.step(); schedule.get_last_lr()
        [0.25]
    """
    num_training_steps = _require_steps(num_training_steps)
    # A resumed run may have decayed the rate already; the schedule keeps the full one.
    first_group = _first_group(optimizer)
    full_rate = float(first_group.get("initial_lr", first_group["lr"]))
    if not 0 <= lr_end < full_rate:
        raise ValueError(
            f"lr_end is {lr_end}, and the optimizer's lr {full_rate}: the rate decays, so lr_end must be below it."
        )
    floor = lr_end / full_rate
    warmup = _Warmup(num_warmup_steps, warmup_ratio, num_training_steps)
    num_decay_steps = max(1, num_training_steps - warmup.num_steps)  # not 0 in a run of 0 steps, as a divisor

    def decay(step: int) -> float:
        remaining = max(0.0, 1.0 - step / num_decay_steps)  # not negative after the run's last step
        return floor + (1.0 - floor) * remaining**power

    return warmup.then(decay, optimizer, last_epoch)


def _first_group(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the first parameter group of an optimizer, or of the first of several."""
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:  # a wrapper of one optimizer per parameter
        first_optimizer = next(iter(optimizer.optim_map.values()))
        groups = first_optimizer.param_groups
    return groups[0]


def get_lr(optimizer: torch.optim.Optimizer) -> float:
    """Return the learning rate of an optimizer's first parameter group.

    Groups may have different rates (say, matrices and norms), but a schedule scales all of them alike.

    Example:
        >>> torchtune.training.get_lr(torch.optim.SGD(model.parameters(), lr=0.5))
        0.5
    """
    return float(_first_group(optimizer)["lr"])
