"""Norm and clipping of gradients with different shardings."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from torchtune.training.parallel._shards import own_part, reduce_partial


def _norm_over(norms: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(norms) == 1:
        return norms[0]
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))


def _full_norm(grads: list[torch.Tensor]) -> torch.Tensor:
    """Return the norm over all ranks of gradients of one dtype, device and sharding."""
    like = grads[0]
    wide = torch.promote_types(like.dtype, torch.float32)  # a 16-bit norm has only 8 or 11 significant bits
    norm = _norm_over(torch._foreach_norm([own_part(grad) for grad in grads], 2, dtype=wide))
    if not isinstance(like, DTensor):
        return norm
    total = norm**2
    for dim, placement in enumerate(like.placements):
        if not placement.is_replicate():
            dist.all_reduce(total, group=like.device_mesh.get_group(dim))
    return total.sqrt()


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[torch.Tensor], max_norm: float | None, loss_scale: float = 1.0
) -> torch.Tensor:
    """Scale gradients in place so that their norm over all parameters and ranks is at most ``max_norm``.

    The norm is computed in float32 or wider. Gradients may be sharded over different mesh dimensions; replicas count
    once.

    Args:
        parameters: parameters; parameters without a gradient are skipped.
        max_norm: maximum norm; None only computes the norm.
        loss_scale: factor of all gradients, see :class:`~torchtune.training.LossScaler`. It is taken out of the norm
            and of gradients that are not float16; those of float16 keep it, because small ones would round to zero.

    Returns:
        Scalar tensor: the norm before clipping, without the loss scale.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> norm = torchtune.training.clip_grad_norm_([weight], 1.0)
        >>> round(float(norm), 3), round(weight.grad.norm().item(), 3)
        (5.0, 1.0)
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    kinds: dict[object, list[torch.Tensor]] = {}
    for grad in map(reduce_partial, grads):
        sharding = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None
        kinds.setdefault((sharding, grad.device, grad.dtype), []).append(grad)
    norm = _norm_over([_full_norm(alike) for alike in kinds.values()] or [torch.zeros(())])
    norm = norm if loss_scale == 1.0 else norm / loss_scale
    if max_norm is None and loss_scale == 1.0:
        return norm
    clip = torch.ones_like(norm) if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for device, dtype in {(grad.device, grad.dtype): None for grad in grads}:
        own = [own_part(grad) for grad in grads if (grad.device, grad.dtype) == (device, dtype)]
        factor = clip if dtype == torch.float16 or loss_scale == 1.0 else clip / loss_scale
        torch._foreach_mul_(own, factor.to(device))
    return norm
