"""What this rank holds of a sharded tensor."""

import torch
from torch.distributed.tensor import DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a sharded tensor that this rank holds, in the same memory; any other tensor as it is."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor


def local_grad(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The gradient of what this rank holds of a parameter."""
    grad = parameter.grad
    if isinstance(grad, DTensor) and grad.placements != parameter.placements:
        grad = grad.redistribute(placements=parameter.placements)  # summands of ranks that hold the same, for one
    return local(grad)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether this rank holds a part and not the whole."""
    return isinstance(tensor, DTensor) and any(placement.is_shard() for placement in tensor.placements)
