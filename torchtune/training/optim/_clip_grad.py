"""The norm of gradients that are sharded in different ways."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from torchtune.utils import computes_on_cpu

_PIECE = 2**16


def _norm(grads: list[torch.Tensor]) -> torch.Tensor:
    """Norm of plain gradients, in float32 at least.

    In its own type the norm of a 16-bit gradient has 8 or 11 significant bits, and a sum of such squares fewer still.
    """
    wide = [grad for grad in grads if grad.itemsize >= 4]
    norms = [torch.nn.utils.get_total_norm(wide)] if wide else []
    for device in {grad.device: None for grad in grads if grad.itemsize < 4}:
        halves = [grad for grad in grads if grad.itemsize < 4 and grad.device == device]
        norms += (
            _norms_on_cpu(halves) if computes_on_cpu(device) else torch._foreach_norm(halves, 2, dtype=torch.float32)
        )
    if len(norms) == 1 or not norms:
        return norms[0] if norms else torch.zeros(())
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))


def _norms_on_cpu(halves: list[torch.Tensor]) -> list[torch.Tensor]:
    """float32 norms of pieces: the fused kernel converts whole tensors there, and adds up millions one by one."""
    pieces = [piece for grad in halves for piece in grad.reshape(-1).split(_PIECE)]
    buffer = torch.empty(max(piece.numel() for piece in pieces))
    return [torch.linalg.vector_norm(buffer[: piece.numel()].copy_(piece)) for piece in pieces]


def _squared_norm(grads: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Squared norm of gradients that are all sharded as ``like`` is, in float32 at least."""
    total = _norm(grads) ** 2
    if isinstance(like, DTensor):
        for dim, placement in enumerate(like.placements):
            if not placement.is_replicate():
                dist.all_reduce(total, group=like.device_mesh.get_group(dim))
    return total


def _summed(grad: torch.Tensor) -> torch.Tensor:
    """``grad`` with the summands that ranks may hold of it added up."""
    if not isinstance(grad, DTensor) or not any(placement.is_partial() for placement in grad.placements):
        return grad
    return grad.redistribute(placements=[Replicate() if p.is_partial() else p for p in grad.placements])


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[torch.Tensor], max_norm: float | None) -> torch.Tensor:
    """Scale gradients in place so that their norm over all parameters and ranks is at most ``max_norm``.

    The norm is taken in float32 at least, whatever the type of the gradients is. Sharded ones may be so over different
    dimensions of the mesh: what several ranks hold whole counts once.

    Args:
        parameters: those without gradient are left out.
        max_norm: see above; None leaves them as they are.

    Returns:
        the norm before, a scalar.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> norm = torchtune.training.clip_grad_norm_([weight], 1.0)
        >>> round(float(norm), 3), round(weight.grad.norm().item(), 3)
        (5.0, 1.0)
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    kinds: dict[object, list[torch.Tensor]] = {}
    for grad in map(_summed, grads):
        kind = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None
        kinds.setdefault((kind, None if kind is None else grad.dtype), []).append(grad)
    if list(kinds) in ([], [(None, None)]):
        norm = _norm(grads)
    else:
        local = [[g.to_local() if isinstance(g, DTensor) else g for g in group] for group in kinds.values()]
        norm = torch.stack([_squared_norm(mine, g[0]) for mine, g in zip(local, kinds.values(), strict=True)])
        norm = norm.sum().sqrt()
    if max_norm is not None:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        own = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
        for device, dtype in {(grad.device, grad.dtype): None for grad in own}:
            torch._foreach_mul_([g for g in own if (g.device, g.dtype) == (device, dtype)], scale.to(device))
    return norm
