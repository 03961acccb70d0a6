"""The norm of gradients that are sharded in different ways."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def _squared_norm(grads: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Squared norm of gradients that are all sharded as ``like`` is, in float32 at least."""
    total = torch.nn.utils.get_total_norm(grads).to(torch.float32 if grads[0].itemsize < 4 else grads[0].dtype) ** 2
    if isinstance(like, DTensor):
        for dim, placement in enumerate(like.placements):
            if not placement.is_replicate():
                dist.all_reduce(total, group=like.device_mesh.get_group(dim))
    return total


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[torch.Tensor], max_norm: float | None) -> torch.Tensor:
    """Scale gradients in place so that their norm over all parameters and ranks is at most ``max_norm``.

    Plain parameters are handled as ``torch.nn.utils.clip_grad_norm_`` does. Sharded ones may be so over different
    dimensions of the mesh: what several ranks hold whole counts once.

    Args:
        parameters: those without gradient are left out.
        max_norm: see above; None leaves them as they are.

    Returns:
        the norm before, a scalar.
    """
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    grads = [parameter.grad for parameter in parameters]
    if not any(isinstance(grad, DTensor) for grad in grads):
        if max_norm is None:
            return torch.nn.utils.get_total_norm(grads)
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    kinds: dict[object, list[torch.Tensor]] = {}
    for grad in grads:
        kind = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None
        kinds.setdefault((kind, grad.dtype), []).append(grad)
    local = {key: [g.to_local() if isinstance(g, DTensor) else g for g in group] for key, group in kinds.items()}
    squares = [_squared_norm(local[key], group[0]) for key, group in kinds.items()]
    norm = torch.stack(squares).sum().sqrt()
    if max_norm is None:
        return norm
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for group in local.values():
        torch._foreach_mul_(group, scale.to(group[0].device))
    return norm
