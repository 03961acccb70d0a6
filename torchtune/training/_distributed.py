"""Processes and threads."""

import os

import torch
import torch.distributed as dist

from torchtune.utils import DeviceSupport, get_logger


def is_distributed() -> bool:
    """Whether this process was started by torchrun with more than its own rank known, and torch can communicate."""
    return dist.is_available() and {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def is_restart() -> bool:
    """Whether torchrun started this process again, after one of its group had died: the run then goes on by itself.

    Machines that join or leave (``--nnodes 1:4``) start the processes anew without being counted as a restart.
    """
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def get_distributed_backend(device_type: str, offload_ops_to_cpu: bool = False) -> str:
    """Backend for ``init_process_group``, for example ``"nccl"``, or ``"cuda:nccl,cpu:gloo"`` with CPU offload."""
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
    """Check that every parameter and buffer holds data. Raises ``RuntimeError`` that names the first that does not."""
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            if tensor.is_meta:
                raise RuntimeError(f"The {kind} {name} is still on the meta device: nothing was loaded into it.")
