"""The part of a sharded tensor that this process holds."""

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
