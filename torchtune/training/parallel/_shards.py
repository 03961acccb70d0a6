"""The part of a sharded tensor that this process holds."""

import math
from dataclasses import dataclass

import torch


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """The shard of a sharded tensor that this rank holds, in the same memory; a plain tensor as it is."""
    return tensor.detach().to_local() if hasattr(tensor, "device_mesh") else tensor


def shard_key(parameter: torch.nn.Parameter) -> str:
    """Names the shard of ``parameter`` that this rank holds: the same on its replicas, another on other shards.

    It says where the rank stands along the dimensions of the mesh over which the parameter is sharded; ``""`` for a
    parameter that every rank holds whole.
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
        from torch.distributed.tensor import DTensor, Replicate, Shard

        if not self.sizes:
            return shard
        if shard.numel() < longest:
            shard = torch.nn.functional.pad(shard, (0, longest - shard.numel()))
        order = iter(range(len(self.sizes)))
        placements = [Replicate() if kind.is_replicate() else Shard(next(order)) for kind in parameter.placements]
        row = shard.view(*[1] * len(self.sizes), longest)
        return DTensor.from_local(row, parameter.device_mesh, placements, run_check=False)
