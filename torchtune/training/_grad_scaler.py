"""Scaling of gradients in place."""

from collections.abc import Iterable

import torch


@torch.no_grad()
def scale_grads_(
    parameters: torch.Tensor | Iterable[torch.Tensor], scaler: torch.Tensor, foreach: bool | None = None
) -> None:
    """Multiply the gradients of ``parameters`` by ``scaler`` in place, each in its own type.

    Args:
        parameters: one tensor or several; those without a gradient are passed over.
        scaler: a scalar tensor.
        foreach: ``False`` goes tensor by tensor; otherwise one fused call per device and type.
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
