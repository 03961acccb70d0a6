"""Device selection by name, and simulated runs, in which fake CPU tensors represent accelerator tensors."""

import os
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any

from torchtune.utils._errors import UserError

if TYPE_CHECKING:
    import torch


class DeviceSupport(Enum):
    """Device types, with a display name and the backend for collectives.

    Example:
        >>> torchtune.utils.DeviceSupport.from_type("cpu").name
        'CPU'
    """

    CPU = ("cpu", "CPU", "gloo")
    CUDA = ("cuda", "GPU", "nccl")
    NPU = ("npu", "NPU", "hccl")
    XPU = ("xpu", "XPU", "ccl")
    MPS = ("mps", "MPS", "gloo")
    HPU = ("hpu", "HPU", "hccl")

    def __init__(self, device_type: str, device_name: str, communication_backend: str) -> None:
        self.device_type = device_type
        self.device_name = device_name
        self.communication_backend = communication_backend

    @staticmethod
    def from_type(device_type: str) -> "DeviceSupport":
        """Return the member of ``device_type`` (``"cuda"`` …). Raises ``ValueError`` for an unknown type."""
        for member in DeviceSupport:
            if member.device_type == device_type:
                return member
        raise ValueError(f"Unknown device type '{device_type}': one of {[m.device_type for m in DeviceSupport]}.")


def to_device(values: Any, device: "torch.device", dtype: "torch.dtype | None" = None) -> "torch.Tensor":
    """Make a tensor of numbers, or lists of them, on a device.

    On CUDA they are copied from pinned memory, so that the host does not wait, as ``torch.tensor`` lets it.
    """
    import torch

    if device.type != "cuda" or torch.compiler.is_compiling():
        return torch.tensor(values, dtype=dtype, device=device)
    pinned = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=True)
    return pinned.to(device, non_blocking=True)


def fill_from_cpu(tensor: "torch.Tensor", fill: "Callable[[torch.Tensor], Any]") -> None:
    """Fill a tensor with random initial values of the CPU's generator.

    Each kind of device has a generator of its own: with the CPU's, a seed means the same start on all of them.

    Args:
        tensor: tensor without values. Of a sharded one (``DTensor``), rank 0 draws all values and sends the shards: a
            collective.
        fill: an initialization of ``torch.nn.init``, which draws the values in place.
    """
    import torch

    values = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    fill(values)
    if hasattr(tensor, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        mesh = tensor.device_mesh
        values = distribute_tensor(values.to(mesh.device_type), mesh, tensor.placements)
    with torch.no_grad():
        tensor.copy_(values)


def _available(device_type: str) -> bool:
    import torch

    if device_type == "cpu":
        return True
    if device_type == "mps":
        return torch.backends.mps.is_available()
    namespace = getattr(torch, device_type, None)
    return namespace is not None and namespace.is_available()


def get_device_support() -> DeviceSupport:
    """Return the best available device type: CUDA, NPU, XPU, HPU, MPS, then CPU."""
    for member in (
        DeviceSupport.CUDA,
        DeviceSupport.NPU,
        DeviceSupport.XPU,
        DeviceSupport.HPU,
        DeviceSupport.MPS,
    ):
        if _available(member.device_type):
            return member
    return DeviceSupport.CPU


def get_torch_device_namespace() -> Any:
    """Return torch's module of the best device type, for example ``torch.cuda``."""
    import torch

    return getattr(torch, get_device_support().device_type)


def parse_device(device: str | None) -> "torch.device":
    """Convert a name to a device; ``None`` is the best available device.

    Raises:
        UserError: the name is not a valid device.
    """
    import torch

    try:
        return torch.device(device or get_device_support().device_type)
    except RuntimeError as error:
        names = ", ".join(member.device_type for member in DeviceSupport)
        hint = "; NVIDIA and AMD GPUs are called cuda" if str(device).lower().startswith("gpu") else ""
        raise UserError(f"device: '{device}' is not a device name: use one of {names}{hint}.") from error


def find_device(device: str | None) -> "torch.device":
    """Convert a name to a device of this machine, without initializing the device.

    Raises:
        UserError: the name is not a valid device, or this machine does not have the device.
    """
    import torch

    chosen = parse_device(device)
    if not _available(chosen.type):
        best = get_device_support().device_type
        raise UserError(
            f"device: '{device}' was asked for, but torch {torch.__version__} finds no {chosen.type} device here: "
            f"set device={best}, or install the build of torch for your hardware."
        )
    if chosen.type in ("cpu", "mps"):  # there is one device of the type, without an index
        return chosen
    count = getattr(torch, chosen.type).device_count()
    index = chosen.index
    if index is None:  # the processes of a machine have a device each
        index = int(os.environ.get("LOCAL_RANK", "0"))
    if index >= count:
        wanted = f"'{chosen.type}:{index}' was asked for"
        if chosen.index is None:
            wanted = f"process {index} of this machine needs '{chosen.type}:{index}'"
        raise UserError(f"device: {wanted}, but this machine has {count}.")
    return torch.device(chosen.type, index)


def get_device(device: str | None = None) -> "torch.device":
    """Convert a name to a device and make it the current device; ``None`` is the best available device.

    In a distributed run, a device type without an index gets the local rank as its index. On CPU, the caches of
    oneDNN's kernels are bounded.

    Raises:
        UserError: this machine does not have the device.

    Example:
        >>> torchtune.utils.get_device("cpu")
        device(type='cpu')
    """
    import torch

    chosen = find_device(device)
    if chosen.index is not None and chosen.type not in ("cpu", "mps"):
        getattr(torch, chosen.type).set_device(chosen)
    if chosen.type == "cpu":
        from torchtune.utils._torch_private import bound_onednn_caches

        bound_onednn_caches()
    return chosen


def get_world_size_and_rank() -> tuple[int, int]:
    """Return the world size and rank of the default process group, (1, 0) without one.

    Example:
        >>> torchtune.utils.get_world_size_and_rank()
        (1, 0)
    """
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    return 1, 0


def batch_to_device(batch: MutableMapping[str, Any], device: "torch.device") -> None:
    """Move all values of ``batch`` with a method ``to`` to ``device``, in place and in nested dicts.

    Other values (numbers, strings, lists) stay unchanged.

    Args:
        batch: a dict or a :class:`torchtune.data.Batch`.
        device: target device.

    Example:
        >>> batch = {"tokens": torch.tensor([1, 2])}
        >>> torchtune.utils.batch_to_device(batch, torch.device("cpu"))
    """
    for key, value in batch.items():
        if isinstance(value, dict):
            batch_to_device(value, device)
        elif hasattr(value, "to"):
            batch[key] = value.to(device)


# Whether a run is simulated, and whether its CPU allocations count as host memory.
_is_simulated = False
_counts_host_memory = False


def is_simulated() -> bool:
    """Return whether :func:`simulated` is active; a simulation writes no files and calls no remote service."""
    return _is_simulated


def computes_on_cpu(device: "torch.device") -> bool:
    """Return whether CPU-specific code paths apply; in a simulation, CPU tensors represent accelerator tensors."""
    return device.type == "cpu" and not _is_simulated


def launches_kernels(device: "torch.device") -> bool:
    """Return whether an uncompiled operator costs a launch: on CUDA, and in a simulation, which stands for it."""
    return device.type == "cuda" or (device.type == "cpu" and _is_simulated)


@contextmanager
def simulated() -> Iterator[None]:
    """Context manager in which CPU tensors represent accelerator tensors."""
    global _is_simulated
    was_active = _is_simulated
    _is_simulated = True
    try:
        yield
    finally:
        _is_simulated = was_active


@contextmanager
def allocates_on_host() -> Iterator[None]:
    """Context manager in which a simulation counts CPU allocations as host memory."""
    global _counts_host_memory
    was_on_host = _counts_host_memory
    _counts_host_memory = True
    try:
        yield
    finally:
        _counts_host_memory = was_on_host


def is_on_host() -> bool:
    """Return whether :func:`allocates_on_host` is active."""
    return _counts_host_memory
