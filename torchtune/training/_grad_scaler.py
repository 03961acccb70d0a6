"""Scaling of gradients in place."""

from collections.abc import Iterable

import torch


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
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_kind.setdefault((parameter.grad.device, parameter.grad.dtype), []).append(parameter.grad)
    for (device, dtype), grads in by_kind.items():
        factor = scaler.to(device=device, dtype=dtype)
        if foreach is False:
            for grad in grads:
                grad.mul_(factor)
        else:
            torch._foreach_mul_(grads, factor)
