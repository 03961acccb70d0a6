"""The part of a sharded tensor that this process holds."""

import torch


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """The shard of a sharded tensor that this rank holds, in the same memory; a plain tensor as it is."""
    return tensor.detach().to_local() if hasattr(tensor, "device_mesh") else tensor


def shards_of(parameters: list[torch.nn.Parameter]) -> str:
    """Which shards this rank holds, along the dimensions of the mesh over which all parameters are sharded."""
    found = [
        {
            (dim, place)
            for dim, (placement, place) in enumerate(zip(p.placements, p.device_mesh.get_coordinate(), strict=True))
            if not placement.is_replicate()
        }
        for p in parameters
        if hasattr(p, "device_mesh")
    ]
    return f"{sorted(set.intersection(*found))}" if len(found) == len(parameters) else ""
