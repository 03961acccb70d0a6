"""Process groups and CPU threads."""

import os
from typing import Any

import torch
import torch.distributed as dist

from torchtune._lazy import former_names
from torchtune.training.parallel._ranks import any_rank
from torchtune.utils import DeviceSupport, get_logger


def is_distributed() -> bool:
    """Return whether torchrun started this process and ``torch.distributed`` is available.

    Example:
        >>> torchtune.training.is_distributed()
        False
    """
    return dist.is_available() and {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def is_restart() -> bool:
    """Return whether torchrun restarted a worker of this run after a failure, so that the run resumes automatically.

    A collective: torchrun counts restarts per machine, and all ranks return the same value. A change in the number of
    machines (``--nnodes 1:4``) is not a restart: set ``resume_from_checkpoint=True`` for it.

    Example:
        >>> torchtune.training.is_restart()
        False
    """
    is_local_restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    return any_rank(is_local_restart)


def join_process_group(backend: str, **options: Any) -> None:
    """Call ``init_process_group`` with the environment set by torchrun.

    torchrun keeps its store across restarts. A rank that reads another rank's address from before a restart cannot
    connect, so keys get a new prefix after each restart.

    gloo connects two ranks at their first message instead of all pairs at once: an all-reduce needs only two
    neighbors. ``TORCH_GLOO_LAZY_INIT=0`` in the environment restores torch's default.
    """
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    uses_agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if restarts != "0" and uses_agent_store:
        world_size = int(os.environ["WORLD_SIZE"])
        host = os.environ["MASTER_ADDR"]
        port = int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(host, port, world_size, is_master=False)
        options["store"] = dist.PrefixStore(f"life {restarts}", store)
        options["rank"] = int(os.environ["RANK"])
        options["world_size"] = world_size
    dist.init_process_group(backend, **options)


def get_distributed_backend(device_type: str, offload_ops_to_cpu: bool = False) -> str:
    """Return the backend of ``init_process_group``, e.g. ``"nccl"``, or ``"cuda:nccl,cpu:gloo"`` for CPU offload.

    Example:
        >>> torchtune.training.get_distributed_backend("cpu")
        'gloo'
    """
    backend = DeviceSupport.from_type(device_type).communication_backend
    if offload_ops_to_cpu and device_type != "cpu":
        return f"{device_type}:{backend},cpu:gloo"
    return backend


def set_torch_num_threads() -> None:
    """Divide the machine's CPU cores among its local ranks."""
    cores = os.cpu_count() or 1
    threads = max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    torch.set_num_threads(threads)
    get_logger().info(f"torch uses {threads} threads on this rank.")


def validate_no_params_on_meta_device(model: torch.nn.Module) -> None:
    """Raise ``RuntimeError`` with the name of the first parameter or buffer that is on the meta device, if any.

    Example:
        >>> torchtune.training.validate_no_params_on_meta_device(model)
    """
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            if tensor.is_meta:
                raise RuntimeError(f"The {kind} {name} is still on the meta device: nothing was loaded into it.")


__getattr__ = former_names(__name__)
