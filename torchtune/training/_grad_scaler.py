"""Scaling of losses and gradients."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from torchtune.modules.optim import OptimizerInBackward, OptimizerMap
from torchtune.training.optim import LowPrecisionOptimizer
from torchtune.utils import UserError


class LossScaler:
    """Scales the loss of a float16 model, so that small gradients do not round to zero.

    float16 ends at 6e-8 and at 65504. The loss is multiplied by a power of two. Gradients in float16 keep this factor
    until the optimizer has them in float32; :func:`~torchtune.training.clip_grad_norm_` takes it out of all others. A
    step whose gradients overflow is skipped by :class:`~torchtune.supervision.StepGuard`, and halves the factor; 2,000
    steps without an overflow double it. With other dtypes the factor is 1 and stays 1.

    Args:
        optimizer: from :func:`~torchtune.training.setup_optimizer`.
        dtype: dtype of the model.

    Attributes:
        factor: factor of the loss.

    Raises:
        UserError: float16 with an optimizer that steps in the backward pass, or in float16.

    Example:
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> torchtune.training.LossScaler(optimizer, torch.float32).factor
        1.0
    """

    START = 2.0**16
    STEPS_TO_DOUBLE = 2000

    def __init__(self, optimizer: Optimizer, dtype: torch.dtype) -> None:
        self.is_enabled = dtype == torch.float16
        self.factor = 1.0
        self._good_steps = 0
        self._optimizers: list[LowPrecisionOptimizer] = []
        if not self.is_enabled:
            return
        if isinstance(optimizer, OptimizerInBackward):
            raise UserError(
                "optimizer_in_bwd: dtype fp16 must see all gradients before the first weight changes, because they may "
                "overflow: set optimizer_in_bwd=False."
            )
        for single_optimizer in _single_optimizers(optimizer):
            if isinstance(single_optimizer, LowPrecisionOptimizer):
                self._optimizers.append(single_optimizer)
                continue
            for group in single_optimizer.param_groups:
                if any(parameter.dtype == torch.float16 for parameter in group["params"]):
                    raise UserError(
                        "optimizer_precision: param_dtype would step in fp16, in which updates are lost: set "
                        "optimizer_precision=fp32_master for dtype fp16."
                    )
        self._set(self.START)

    def _set(self, factor: float) -> None:
        """Set the factor here, and where the optimizers take it out of the gradients."""
        self.factor = factor
        for optimizer in self._optimizers:
            optimizer.loss_scale = factor

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss, scaled if the model is in float16."""
        return loss * self.factor if self.is_enabled else loss

    @property
    def can_shrink(self) -> bool:
        """Whether an overflow can be avoided by a smaller factor."""
        return self.is_enabled and self.factor > 1.0

    def update(self, *, has_overflowed: bool) -> None:
        """Adapt the factor after a step; equal on all ranks, as the norm of the gradients is."""
        if not self.is_enabled:
            return
        if has_overflowed:
            self._good_steps = 0
            self._set(max(1.0, self.factor / 2))
            return
        self._good_steps += 1
        if self._good_steps == self.STEPS_TO_DOUBLE:
            self._good_steps = 0
            self._set(self.factor * 2)

    def state_dict(self) -> dict[str, Any]:
        """Return the factor and the number of steps since it changed; empty if the model is not in float16."""
        if not self.is_enabled:
            return {}
        return {"factor": self.factor, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`; a run that was not in float16 begins anew."""
        if self.is_enabled and state:
            self._good_steps = int(state["good_steps"])
            self._set(float(state["factor"]))


def _single_optimizers(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yield the optimizers of a combined one, or the optimizer itself."""
    if not isinstance(optimizer, OptimizerMap):
        yield optimizer
        return
    for member in optimizer.optim_map.values():
        yield from _single_optimizers(member)


@torch.no_grad()
def scale_grads_(
    parameters: torch.Tensor | Iterable[torch.Tensor], scaler: torch.Tensor, foreach: bool | None = None
) -> None:
    """Multiply the gradients of ``parameters`` by ``scaler`` in place, each in its own dtype.

    Args:
        parameters: one tensor or several; tensors without a gradient are skipped.
        scaler: a scalar tensor.
        foreach: False scales tensor by tensor; otherwise one fused call per device and dtype.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([2.0, 4.0])
        >>> torchtune.training.scale_grads_([weight], torch.tensor(0.5))
        >>> weight.grad
        tensor([1., 2.])
    """
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    # A fused call takes tensors of one device and dtype.
    grads_by_device_and_dtype: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None:
            grads_by_device_and_dtype.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, dtype), grads in grads_by_device_and_dtype.items():
        factor = scaler.to(device=device, dtype=dtype)
        if foreach is False:
            for grad in grads:
                grad.mul_(factor)
        else:
            torch._foreach_mul_(grads, factor)
