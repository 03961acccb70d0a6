"""A process group of any size in one process, without any other process."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from torchtune.training.simulate._torch_private import fake_store


def _fill(found: list[Any], value: Any, *_: Any, **__: Any) -> None:
    found[:] = [value] * len(found)


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _is_simulated(processes: int) -> bool:
    return dist.is_initialized() and dist.get_backend() == "fake" and dist.get_world_size() == processes


@contextmanager
def simulated_cluster(processes: int, per_machine: int) -> Iterator[None]:
    """A block in which this process is rank 0 of ``processes``; nothing is sent, and what is received is unfilled.

    Groups that the host talks over are simulated as well. Objects that ranks exchange are those of this one.

    Args:
        processes: of the run; 1 changes nothing, nor does a block inside another of the same size. Many simulations
            in one process are put into one block: DTensor remembers groups of an earlier one, and uses them.
        per_machine: of them on a machine.
    """
    if processes == 1 or _is_simulated(processes):
        yield
        return
    local = min(processes, per_machine)
    variables = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": local, "MASTER_PORT": 1}
    environment = {name: str(value) for name, value in variables.items()} | {"MASTER_ADDR": "simulated"}
    new_group, destroy, module = dist.new_group, dist.destroy_process_group, dist.distributed_c10d

    def fake_group(*args: Any, **kwargs: Any) -> Any:
        return new_group(*args, **{**kwargs, "backend": "fake"})

    changed = {
        "new_group": fake_group,
        "all_gather_object": _fill,
        "broadcast_object_list": _nothing,
        "barrier": _nothing,
        "monitored_barrier": _nothing,
        "destroy_process_group": _nothing,
    }
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, environment))
        dist.init_process_group("fake", store=fake_store(), rank=0, world_size=processes)
        stack.callback(destroy)
        for name, function in changed.items():
            for owner in (dist, module):
                stack.enter_context(mock.patch.object(owner, name, function))
        yield


@contextmanager
def one_thread() -> Iterator[None]:
    """A block in which backward passes run in the calling thread, where its modes hold."""
    before = torch.autograd.is_multithreading_enabled()
    torch.autograd.set_multithreading_enabled(False)
    try:
        yield
    finally:
        torch.autograd.set_multithreading_enabled(before)
