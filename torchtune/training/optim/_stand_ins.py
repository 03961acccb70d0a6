"""What an optimizer steps in the place of stored weights: pieces of parameters, or whole ones, in float32."""

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from torchtune.training.parallel._shards import own_part


@dataclass(frozen=True, eq=False)
class Piece:
    """Elements ``start`` to ``stop`` of a parameter; ``stop`` is None for the whole one, in its own shape."""

    parameter: torch.nn.Parameter
    start: int = 0
    stop: int | None = None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same elements of a tensor that is shaped like the parameter, or like its shard on this rank."""
        return own_part(tensor) if self.stop is None else own_part(tensor).view(-1)[self.start : self.stop]

    @property
    def numel(self) -> int:
        """Elements of this rank."""
        return own_part(self.parameter).numel() if self.stop is None else self.stop - self.start


class Scratch:
    """float32 memory for the stand-ins of one batch, used again for the next one."""

    def __init__(self, device: torch.device, numel: int) -> None:
        self._block = torch.empty(numel, dtype=torch.float32, device=device)
        self._used = 0

    def reset(self) -> None:
        """Forget what was copied."""
        self._used = 0

    def copy(self, source: torch.Tensor) -> torch.Tensor:
        """A contiguous float32 copy of ``source``."""
        start, self._used = self._used, self._used + source.numel()
        if self._used > self._block.numel():
            return torch.empty(source.shape, dtype=torch.float32, device=source.device).copy_(source)
        return self._block[start : self._used].view(source.shape).copy_(source)


def grad_like(grad: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
    """``grad`` laid out as ``parameter`` is, so that a piece of one is a piece of the other."""
    if hasattr(grad, "device_mesh") and grad.placements != parameter.placements:
        grad = grad.redistribute(placements=parameter.placements)  # ranks may hold summands of it
    grad, parameter = own_part(grad), own_part(parameter)
    return grad if grad.is_contiguous() or not parameter.is_contiguous() else grad.contiguous()


def whole(shard: torch.Tensor, parameter: DTensor) -> torch.Tensor:
    """All-gather what is sharded as ``parameter`` is."""
    shape, stride = parameter.shape, parameter.stride()
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=shape, stride=stride).full_tensor()


def own_slice(tensor: torch.Tensor, parameter: DTensor) -> torch.Tensor:
    """This rank's shard of a whole tensor shaped like ``parameter``."""
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()
