"""Processes and threads."""

import os
from typing import Any

import torch
import torch.distributed as dist

from torchtune.training.parallel._ranks import any_rank
from torchtune.utils import DeviceSupport, get_logger


def is_distributed() -> bool:
    """Whether this process was started by torchrun with more than its own rank known, and torch can communicate.

    Example:
        >>> torchtune.training.is_distributed()
        False
    """
    return dist.is_available() and {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def is_restart() -> bool:
    """Whether torchrun started a process of this run again, after one had died: the run then goes on by itself.

    All processes call it, and are told the same: torchrun counts restarts machine by machine. Machines that join or
    leave (``--nnodes 1:4``) are no restart: give ``resume_from_checkpoint=True`` with them.

    Example:
        >>> torchtune.training.is_restart()
        False
    """
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    return any_rank(again)


def join_process_group(backend: str, **options: Any) -> None:
    """``init_process_group`` with what torchrun told this process.

    torchrun hands the store of one life of its workers on to the next. Where a rank finds the address that another had
    in its last life, the two cannot connect; so each life has keys of its own.

    gloo connects two ranks when they first talk, not all with all: an all-reduce needs two neighbours, whatever the
    number of ranks. ``TORCH_GLOO_LAZY_INIT=0`` in the environment brings torch's default back.
    """
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    life, told = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), os.environ
    if life != "0" and told.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        rank, size = int(told["RANK"]), int(told["WORLD_SIZE"])
        store = dist.TCPStore(told["MASTER_ADDR"], int(told["MASTER_PORT"]), size, is_master=False)
        options |= {"store": dist.PrefixStore(f"life {life}", store), "rank": rank, "world_size": size}
    dist.init_process_group(backend, **options)


def get_distributed_backend(device_type: str, offload_ops_to_cpu: bool = False) -> str:
    """Backend for ``init_process_group``, for example ``"nccl"``, or ``"cuda:nccl,cpu:gloo"`` with CPU offload.

    Example:
        >>> torchtune.training.get_distributed_backend("cpu")
        'gloo'
    """
    backend = DeviceSupport.from_type(device_type).communication_backend
    if offload_ops_to_cpu and device_type != "cpu":
        return f"{device_type}:{backend},cpu:gloo"
    return backend


def set_torch_num_threads() -> None:
    """Share the cores of the machine among its local ranks."""
    cores = os.cpu_count() or 1
    threads = max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    torch.set_num_threads(threads)
    get_logger().info(f"torch uses {threads} threads on this rank.")


def validate_no_params_on_meta_device(model: torch.nn.Module) -> None:
    """Check that every parameter and buffer holds data. Raises ``RuntimeError`` that names the first that does not.

    Example:
        >>> torchtune.training.validate_no_params_on_meta_device(model)
    """
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            if tensor.is_meta:
                raise RuntimeError(f"The {kind} {name} is still on the meta device: nothing was loaded into it.")
