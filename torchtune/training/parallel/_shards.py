"""The shard of a tensor on this rank: which slice of the full tensor it is, and its values."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from torchtune.models import Slices
from torchtune.training.parallel._ranks import Ranks


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """The values of this rank's shard, in the same memory; a plain tensor is returned itself."""
    return tensor.detach().to_local() if hasattr(tensor, "device_mesh") else tensor


def shard_key(parameter: torch.nn.Parameter) -> str:
    """Name of this rank's shard of ``parameter``: equal on its replicas, different on other shards.

    It is made of the rank's coordinates in the mesh dimensions over which the parameter is sharded; ``""`` for a
    replicated parameter.
    """
    if not hasattr(parameter, "device_mesh"):
        return ""
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or range(mesh.ndim)
    where = zip(names, parameter.placements, mesh.get_coordinate(), mesh.shape, strict=True)
    return " ".join(f"{name}:{place}/{size}" for name, kind, place, size in where if not kind.is_replicate())


@dataclass(frozen=True)
class ShardGrid:
    """The shards of a parameter by mesh dimensions over which it is sharded, and which of them this rank holds.

    It stores what belongs to a shard but is not laid out as the parameter is, such as quantised states: stacked, as a
    tensor [*sizes, longest], with a shard in every row.
    """

    sizes: tuple[int, ...]
    place: tuple[int, ...]

    @staticmethod
    def of(parameter: torch.Tensor) -> "ShardGrid":
        """That of a parameter; without dimensions for one that is not sharded."""
        if not hasattr(parameter, "device_mesh"):
            return ShardGrid((), ())
        mesh = parameter.device_mesh
        dims = [dim for dim, kind in enumerate(parameter.placements) if not kind.is_replicate()]
        where = mesh.get_coordinate()
        return ShardGrid(tuple(mesh.shape[dim] for dim in dims), tuple(where[dim] for dim in dims))

    def longest(self, parameter: torch.Tensor) -> int:
        """Elements of the largest shard."""
        shape, sizes = list(parameter.shape), iter(self.sizes)
        for kind in getattr(parameter, "placements", ()):
            if not kind.is_replicate():
                shape[kind.dim] = -(-shape[kind.dim] // next(sizes))
        return math.prod(shape)

    def stack(self, shard: torch.Tensor, parameter: torch.Tensor, longest: int) -> torch.Tensor:
        """Stack the rows [n] of all ranks, each at most ``longest``; a row itself where nothing is sharded."""
        if not self.sizes:
            return shard
        if shard.numel() < longest:
            shard = torch.nn.functional.pad(shard, (0, longest - shard.numel()))
        order = iter(range(len(self.sizes)))
        placements = [Replicate() if kind.is_replicate() else Shard(next(order)) for kind in parameter.placements]
        row = shard.view(*[1] * len(self.sizes), longest)
        return DTensor.from_local(row, parameter.device_mesh, placements, run_check=False)


def spec_of(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor's shape and dtype, as a tensor on the meta device."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def full_slices(shape: torch.Size | tuple[int, ...]) -> Slices:
    """The slices that cover a tensor."""
    return tuple(slice(0, size) for size in shape)


def my_shard(tensor: torch.Tensor) -> tuple[Slices, torch.Tensor]:
    """Which slice of the full tensor this rank holds, and its values, in the same memory."""
    if not isinstance(tensor, DTensor):
        return full_slices(tensor.shape), tensor.detach()
    (chunk,) = tensor.__create_chunk_list__()
    slices = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
    return slices, tensor.detach().to_local()


@dataclass(frozen=True)
class LocalShard:
    """This rank's shard of a tensor that is saved.

    Attributes:
        spec: the full tensor, on the meta device.
        slices: which slice of it this rank holds.
        data: the values of that slice.
        is_writer: whether this rank writes it, among the ranks with the same slice.
    """

    spec: torch.Tensor
    slices: Slices
    data: torch.Tensor
    is_writer: bool

    @staticmethod
    def of(tensor: torch.Tensor, ranks: Ranks, turn: int, parameter: torch.Tensor | None = None) -> "LocalShard":
        """This rank's shard of ``tensor``.

        Args:
            tensor: sharded, or full and equal on all ranks.
            ranks: all ranks.
            turn: chooses the writer among replicas: with consecutive numbers, ranks take turns.
            parameter: a sharded parameter. A plain ``tensor`` of the shape of its shard is a shard like it.
        """
        layout, is_plain = tensor, not isinstance(tensor, DTensor)
        if is_plain and isinstance(parameter, DTensor) and tensor.dim() > 0:
            layout = parameter if tensor.shape == parameter.to_local().shape else tensor
        slices, data = my_shard(layout)
        data = data if layout is tensor else tensor.detach()
        spec = torch.empty(layout.shape, dtype=tensor.dtype, device="meta")
        return LocalShard(spec, slices, data, _is_writer(layout, ranks, turn))


def _is_writer(tensor: torch.Tensor, ranks: Ranks, turn: int) -> bool:
    if not isinstance(tensor, DTensor):
        return ranks.rank == turn % ranks.size
    mesh = tensor.device_mesh
    if mesh.size() < ranks.size and not bool((mesh.mesh == 0).any()):
        return False  # replicated outside of its mesh: the ranks of rank 0's mesh write it
    return all(
        place == turn % mesh.size(dim)
        for dim, (placement, place) in enumerate(zip(tensor.placements, mesh.get_coordinate(), strict=True))
        if placement.is_replicate()
    )


def reshard(model: nn.Module) -> None:
    """Free the all-gathered parameters that FSDP modules keep after a forward pass without a backward pass."""
    for module in model.modules():
        if hasattr(module, "reshard") and hasattr(module, "unshard"):
            module.reshard()


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor on every rank, by an all-gather; all ranks call it."""
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def reduce_partial(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, all-reduced over the mesh dimensions where ranks hold partial sums."""
    if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
        return tensor.redistribute(placements=[Replicate() if p.is_partial() else p for p in tensor.placements])
    return tensor


def read_shard(
    parameter: DTensor, shape: tuple[int, ...], dtype: torch.dtype, read: Callable[[Slices], torch.Tensor]
) -> DTensor:
    """A tensor of a parameter's optimizer state: sharded like the parameter if their shapes agree, else replicated.

    Args:
        parameter: sharded; the tensor is made on its device.
        shape: of the full tensor.
        dtype: of the tensor.
        read: returns a slice of the full tensor.
    """
    if shape == tuple(parameter.shape):
        slices, local = my_shard(parameter)
        new = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        if local.numel():
            my_shard(new)[1].copy_(read(slices))
        return new
    value = read(full_slices(shape)).to(parameter.device, copy=True)
    return DTensor.from_local(value, parameter.device_mesh, [Replicate()] * parameter.device_mesh.ndim, run_check=False)
