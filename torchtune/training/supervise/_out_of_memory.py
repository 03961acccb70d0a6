"""What to do when memory runs out, said by the run that knows its settings."""

import dataclasses
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from torchtune.training.memory import get_memory_stats
from torchtune.training.parallel._parallel_dims import ParallelDims, ParallelDimsError
from torchtune.utils import (
    Activity,
    UserError,
    atomic_write,
    get_logger,
    memory_snapshot,
    note_in_run_log,
    record_memory_history,
)

_MOST = 4  # pieces of advice
_SHORTEST = 256  # tokens below which sequences are not to blame
# What torch says of memory of the host that is not there, on Linux and on Windows, and cuBLAS of the device's.
_HOST = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")
_DEVICE = ("CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")

Changes = dict[str, Any]


class OutOfMemoryError(UserError, RuntimeError):
    """Memory ran out; the message says where, and which settings would need less."""


def _kind(error: BaseException) -> str | None:
    """Whose memory it is that ran out, ``"device"`` or ``"host"``; None for another error."""
    if isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in _DEVICE):
        return "device"
    return "host" if isinstance(error, MemoryError) or any(text in str(error) for text in _HOST) else None


@contextmanager
def explain_out_of_memory(
    cfg: Any, activity: Activity, dims: ParallelDims, *, record_history: bool = False
) -> Iterator[None]:
    """Turn an error for lack of memory inside the block into one that says which settings would need less.

    On CUDA a snapshot of the memory is written to ``<output_dir>/memory/rank_<r>_step_<n>.pickle``, for
    https://pytorch.org/memory_viz.

    Args:
        cfg: settings of the recipe.
        activity: what the process is doing.
        dims: the processes of the run.
        record_history: let the snapshot say where in the code each block came from, which costs a little at every
            allocation.

    Raises:
        OutOfMemoryError: in place of torch's error, of a ``MemoryError``, or of one for host memory.
    """
    on_cuda = torch.cuda.is_available()
    if record_history and on_cuda:
        record_memory_history(True)
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        kind = _kind(error)
        if kind is None:
            raise
        rank = torch.distributed.get_rank() if dims.mesh is not None else 0
        snapshot = _write_snapshot(cfg, rank, activity) if on_cuda and kind == "device" else None
        message = _sentence(cfg, activity, dims, rank, kind) + (
            f"; what filled it is in {snapshot}." if snapshot else "."
        )
        note_in_run_log(message)
        raise OutOfMemoryError(message) from error
    finally:
        if record_history and on_cuda:
            record_memory_history(False)


def _write_snapshot(cfg: Any, rank: int, activity: Activity) -> Path | None:
    path = Path(_get(cfg, "output_dir") or ".") / "memory" / f"rank_{rank}_step_{activity.step + 1}.pickle"
    try:
        with atomic_write(path) as file:
            pickle.dump(memory_snapshot(), file)
    except (UserError, OSError) as error:
        get_logger().warning(f"There is no snapshot of the memory: {error}")
        return None
    return path


def _sentence(cfg: Any, activity: Activity, dims: ParallelDims, rank: int, kind: str) -> str:
    on_cuda = kind == "device" and torch.cuda.is_available()
    device = torch.device("cuda" if on_cuda else "cpu")
    what = f"rank {rank}'s process" if dims.world_size > 1 else "the process"
    stats = get_memory_stats(device, reset_stats=False)
    if on_cuda:
        free, total = (amount / 2**30 for amount in torch.cuda.mem_get_info())
        used = (
            f"{torch.cuda.memory_allocated() / 2**30:.1f} GiB in use, {stats['peak_memory_active']:.1f} at the peak, "
        )
        used += f"{free:.1f} of {total:.1f} free"
        where = f"the GPU of {what}"
    else:
        used = f"{stats['peak_memory_resident']:.1f} GiB at the peak"
        where = what
    shape = activity.shape
    batch = f" with a batch of {' x '.join(map(str, shape))} tokens" if shape else ""
    advice = [_show(changes) for changes in _advice(cfg, activity, dims, kind)][:_MOST]
    text = f"There is not enough memory for {where} {activity}{batch} ({used}): "
    if not advice:
        return text + "no setting would need less: train adapters, a smaller model, or use more or larger devices"
    return text + "set " + ", or ".join(advice)


def _get(cfg: Any, key: str) -> Any:
    """A setting, None if there is none; ``tokenizer.max_seq_len`` looks into a section."""
    for part in key.split("."):
        cfg = cfg.get(part) if isinstance(cfg, Mapping) or hasattr(cfg, "get") else getattr(cfg, part, None)
    return cfg


def _show(changes: Changes) -> str:
    return " ".join(f"{key}={'null' if value is None else value}" for key, value in changes.items())


def _advice(cfg: Any, activity: Activity, dims: ParallelDims, kind: str) -> Iterator[Changes]:
    """Changes that need less memory, the cheapest first; only those that the recipe knows and accepts."""
    on_cuda = torch.cuda.is_available()
    if kind == "host" and on_cuda:  # what was moved there to make room on the device
        found = ({key: False} for key in ("fsdp_cpu_offload", "enable_activation_offloading") if _get(cfg, key))
    else:
        found = (*_smaller_steps(cfg, activity), *_smaller_numbers(cfg, on_cuda), *_more_parts(cfg, dims))
    for changes in found:
        if all(_known(cfg, key) for key in changes) and _accepted(cfg, changes):
            yield changes


def _known(cfg: Any, key: str) -> bool:
    first, _, rest = key.partition(".")
    if rest:
        return _get(cfg, first) is not None
    return first in cfg if isinstance(cfg, Mapping) else hasattr(cfg, first)


def _accepted(cfg: Any, changes: Changes) -> bool:
    """Whether the recipe's own rules allow them."""
    if any("." in key for key in changes) or not dataclasses.is_dataclass(cfg) or not hasattr(cfg, "check"):
        return True
    return not list(dataclasses.replace(cfg, **changes).check())


def _smaller_steps(cfg: Any, activity: Activity) -> Iterator[Changes]:
    """Fewer tokens, or less that is kept of each."""
    if _get(cfg, "enable_activation_checkpointing") is False:
        yield {"enable_activation_checkpointing": True}
    batch, in_backward = _get(cfg, "batch_size") or 1, _get(cfg, "optimizer_in_bwd")
    if activity.phase == "validation":
        if (_get(cfg, "batch_size_val") or batch) > 1:
            yield {"batch_size_val": 1}
    elif batch > 1 and in_backward:
        yield {"batch_size": 1}
    elif batch > 1:
        yield {"batch_size": 1, "gradient_accumulation_steps": batch * (_get(cfg, "gradient_accumulation_steps") or 1)}
    if in_backward is False and not _known(cfg, "save_adapter_weights_only"):  # gradients of adapters are small
        yield {"optimizer_in_bwd": True}
    longest = _get(cfg, "tokenizer.max_seq_len")
    if longest is None and batch == 1 and activity.shape:
        longest = activity.shape[-1]
    if longest is not None and longest > _SHORTEST:
        yield {"tokenizer.max_seq_len": longest // 2}


def _smaller_numbers(cfg: Any, on_cuda: bool) -> Iterator[Changes]:
    """Fewer bytes for each, or in another place."""
    if _get(cfg, "dtype") == "fp32":
        yield {"dtype": "bf16"}
    if on_cuda and _get(cfg, "enable_activation_checkpointing") and _get(cfg, "enable_activation_offloading") is False:
        yield {"enable_activation_offloading": True}


def _more_parts(cfg: Any, dims: ParallelDims) -> Iterator[Changes]:
    """A smaller share for each process."""
    if dims.world_size == 1:
        return
    if _get(cfg, "fsdp_reshard_after_forward") is False:
        yield {"fsdp_reshard_after_forward": True}
    rest = {} if _get(cfg, "data_parallel_shard_dim") == -1 else {"data_parallel_shard_dim": -1}
    sizes = {"dp_replicate": dims.dp_replicate, "tp": dims.tp, "cp": dims.cp}
    if dims.dp_replicate > 1:
        yield {"data_parallel_replicate_dim": 1, **rest}
    for name, key in (("cp", "context_parallel_dim"), ("tp", "tensor_parallel_dim")):
        try:
            ParallelDims(**{**sizes, name: 2 * sizes[name]}, dp_shard=-1, world_size=dims.world_size)
        except ParallelDimsError:
            continue
        yield {key: 2 * sizes[name], **rest}
    if _get(cfg, "fsdp_cpu_offload") is False:
        yield {"fsdp_cpu_offload": True}
