"""A simulated process group of any size within one process."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from torchtune.estimate._torch_private import fake_store, forget_meshes


def _gather_own(objects: list[Any], own_object: Any, *_: Any, **__: Any) -> None:
    """Return this rank's object for every rank."""
    objects[:] = [own_object] * len(objects)


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _is_simulated(processes: int) -> bool:
    return dist.is_initialized() and dist.get_backend() == "fake" and dist.get_world_size() == processes


@contextmanager
def simulated_cluster(processes: int, per_machine: int) -> Iterator[None]:
    """Make this process rank 0 of ``processes`` inside the block.

    Nothing is sent, and received tensors are uninitialized. CPU process groups are simulated, too. Object collectives
    return this rank's objects.

    Args:
        processes: number of processes; 1 changes nothing, nor does a nested block of the same size.
        per_machine: processes per machine.
    """
    if processes == 1 or _is_simulated(processes):
        yield
        return
    local = min(processes, per_machine)
    environment = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(local),
        "MASTER_ADDR": "simulated",
        "MASTER_PORT": "1",
    }
    new_group = dist.new_group
    destroy = dist.destroy_process_group

    def fake_group(*args: Any, **kwargs: Any) -> Any:
        return new_group(*args, **{**kwargs, "backend": "fake"})

    changed = {
        "new_group": fake_group,
        "all_gather_object": _gather_own,
        "broadcast_object_list": _nothing,
        "barrier": _nothing,
        "monitored_barrier": _nothing,
        "destroy_process_group": _nothing,
    }
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, environment))
        dist.init_process_group("fake", store=fake_store(), rank=0, world_size=processes)
        stack.callback(destroy)
        forget_meshes()
        stack.callback(forget_meshes)
        for name, function in changed.items():
            # Torch's own code looks the functions up in the module that defines them.
            for owner in (dist, dist.distributed_c10d):
                stack.enter_context(mock.patch.object(owner, name, function))
        yield


@contextmanager
def one_thread() -> Iterator[None]:
    """Run backward passes in the calling thread inside the block, because dispatch modes are per thread."""
    before = torch.autograd.is_multithreading_enabled()
    torch.autograd.set_multithreading_enabled(False)
    try:
        yield
    finally:
        torch.autograd.set_multithreading_enabled(before)
