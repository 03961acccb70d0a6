"""Cases that several gloo processes run together: each a function of the folder to work in.

Started once for many cases: ``run(number of processes, cases, folder)``.
"""

import os
import traceback
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.devices import DEVICE, own_device
from torchtune.training import ParallelDims, get_distributed_backend, parallelize
from torchtune.utils import FrozenIntegers, forget_meshes

TIMEOUT = 600
CPU = torch.device("cpu")
OURS: dict[str, dict[str, int]] = {"data": {}, "ours": {"tp": 2}, "experts": {"ep": 2}}


def _process(rank: int, size: int, cases: Sequence[Callable[[Path], Any]], folder: Path, store: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    own_device()
    backend = get_distributed_backend(DEVICE, offload_ops_to_cpu=True)
    dist.init_process_group(backend, f"file://{folder}/{store}", rank=rank, world_size=size)
    try:
        for case in cases:
            try:
                case(folder)
            except Exception:  # noqa: BLE001 - told to the parent process
                (folder / f"failed_{rank}").write_text(f"{case.__name__} on rank {rank}\n{traceback.format_exc()}")
                os._exit(1)  # the others would wait
    finally:
        if dist.is_initialized():  # a case may have left it, as a recipe does at its end
            dist.destroy_process_group()


def _context() -> Any:
    """How the processes start: as forks, unless this process has used CUDA, which its forks could not."""
    if not torch.cuda.is_initialized():
        return torch.multiprocessing.get_context("fork")
    import multiprocess  # it passes on functions of functions, as a fork does

    return multiprocess.get_context("spawn")


def run(size: int, cases: Sequence[Callable[[Path], Any]], folder: Path) -> None:
    """Run the cases one after another in ``size`` processes; the first failure fails all."""
    (folder / f"store_{size}").unlink(missing_ok=True)  # of a run before, in the same folder
    # Forks have the caches of DTensor. They may hold meshes of the same sizes from tests that simulated rank 0, and
    # each rank would then work on the shard of rank 0. Cleared here: a fork lacks the threads of the meshes' groups.
    forget_meshes()
    context = _context()
    store = f"store_{uuid.uuid4().hex}"  # one that was used before says where processes of that time could be reached
    processes = [context.Process(target=_process, args=(rank, size, cases, folder, store)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(TIMEOUT)
    alive = [process for process in processes if process.is_alive()]
    for process in alive:
        process.kill()
    failures = [path.read_text() for path in sorted(folder.glob("failed_*"))]
    assert not failures, "\n".join(failures)
    assert not alive, f"{len(alive)} processes hang"
    assert [process.exitcode for process in processes] == [0] * size


def _tensor_parallel(model: nn.Module, mesh: Any) -> None:
    """Projections in by columns, out by rows; the embedding by its rows, the output by columns."""
    plan = {"attn.q_proj": ColwiseParallel(), "attn.k_proj": ColwiseParallel(), "attn.v_proj": ColwiseParallel()}
    plan |= {"attn.output_proj": RowwiseParallel(), "mlp.w1": ColwiseParallel(), "mlp.w3": ColwiseParallel()}
    plan |= {"mlp.w2": RowwiseParallel()}
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)


def shard(model: nn.Module, how: str, device: torch.device = CPU) -> nn.Module:
    """Shard a model over all processes, on a device: ``fsdp``, ``hsdp``, ``tp``, ``fsdp_tp``; or leave it ``whole``.

    ``data`` is the library's FSDP, ``ours`` is tensor parallel in pairs by the library's plan, which knows adapters,
    and FSDP over the pairs, ``experts`` is expert parallel in pairs, and FSDP.
    """
    if how == "whole":
        return model
    if how in OURS:
        dims = ParallelDims(dp_shard=-1, **OURS[how], world_size=dist.get_world_size())
        dims.build_mesh(device.type)
        parallelize(model, dims, device=device)
        return model
    size = dist.get_world_size()
    if how in ("tp", "fsdp_tp"):
        shape = (1, size) if how == "tp" else (size // 2, 2)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "tp"))
        _tensor_parallel(model, mesh["tp"])
        mesh = mesh["dp"]
    elif how == "hsdp":
        mesh = init_device_mesh(device.type, (2, size // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
    if how != "tp":
        with FrozenIntegers():
            for layer in model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
    return model


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of all of a tensor, on every rank, on the host."""
    values = tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
    return values.cpu().clone()
