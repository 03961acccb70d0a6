"""Out-of-memory errors that name the settings to change."""

import dataclasses
import itertools
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from torchtune.config import SettingsView
from torchtune.supervision._step_plan import StepPlan
from torchtune.training.memory import get_memory_stats
from torchtune.training.parallel import ParallelDims, ParallelDimsError
from torchtune.utils import (
    Activity,
    UserError,
    atomic_write,
    get_logger,
    memory_snapshot,
    note_in_run_log,
    record_memory_history,
)

_MAX_SUGGESTIONS = 4
_SHORTEST_TO_HALVE = 256  # tokens; shorter sequences are only suggested above this length
# torch's messages for host memory (Linux, Windows), and CUDA's and cuBLAS's for device memory.
_HOST_MESSAGES = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")
_DEVICE_MESSAGES = ("CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")

Changes = dict[str, Any]


class OutOfMemoryError(UserError, RuntimeError):
    """Memory ran out; the message names the place and settings that need less."""


@contextmanager
def explain_out_of_memory(
    settings: Any, activity: Activity, dims: ParallelDims, *, record_history: bool = False
) -> Iterator[None]:
    """Context manager that turns an out-of-memory error into one that names settings that need less memory.

    On CUDA, it also writes a memory snapshot for https://pytorch.org/memory_viz to
    ``<output_dir>/memory/rank_<r>_step_<n>.pickle``.

    Args:
        settings: settings of the recipe.
        activity: step, phase and last batch of this process, for the message and the name of the snapshot.
        dims: the device mesh.
        record_history: record the stack of every allocation in the snapshot, at a small cost.

    Raises:
        OutOfMemoryError: instead of torch's error for device or host memory, or of a ``MemoryError``.
        RecipeSettingsError: on entry, if a setting is missing.
    """
    cfg = SettingsView.of(settings)
    on_cuda = torch.cuda.is_available()
    if record_history and on_cuda:
        record_memory_history(True)
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in _DEVICE_MESSAGES):
            kind = "device"
        elif isinstance(error, MemoryError) or any(text in str(error) for text in _HOST_MESSAGES):
            kind = "host"
        else:
            raise
        rank = 0
        if dims.mesh is not None:
            rank = torch.distributed.get_rank()
        snapshot = None
        if on_cuda and kind == "device":
            snapshot = _write_snapshot(cfg, rank, activity)
        message = _explain(cfg, activity, dims, rank, kind)
        if snapshot is not None:
            message += f"; what filled it is in {snapshot}"
        message += "."
        note_in_run_log(message)  # in the log file of every rank; the error itself is shown on the terminal
        raise OutOfMemoryError(message) from error
    finally:  # recording takes time and memory
        if record_history and on_cuda:
            record_memory_history(False)


def _write_snapshot(cfg: SettingsView, rank: int, activity: Activity) -> Path | None:
    """Write what fills the memory of the device; return the file, or None if it cannot be written."""
    path = Path(cfg.output_dir or ".") / "memory" / f"rank_{rank}_step_{activity.step + 1}.pickle"
    try:
        with atomic_write(path) as file:
            pickle.dump(memory_snapshot(), file)
    except (UserError, OSError) as error:
        get_logger().warning(f"There is no snapshot of the memory: {error}")
        return None
    return path


def _explain(cfg: SettingsView, activity: Activity, dims: ParallelDims, rank: int, kind: str) -> str:
    """Return the message without its final period: the amounts of memory, and settings that need less."""
    owner = "the process"
    if dims.world_size > 1:
        owner = f"rank {rank}'s process"
    if kind == "device" and torch.cuda.is_available():
        owner = f"the GPU of {owner}"
        stats = get_memory_stats(torch.device("cuda"), reset_stats=False)
        in_use = torch.cuda.memory_allocated() / 2**30
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        amounts = f"{in_use:.1f} GiB in use, {stats['peak_memory_active']:.1f} at the peak"
        amounts += f", {free_bytes / 2**30:.1f} of {total_bytes / 2**30:.1f} free"
    else:
        stats = get_memory_stats(torch.device("cpu"), reset_stats=False)
        amounts = f"{stats['peak_memory_resident']:.1f} GiB at the peak"
    batch = ""
    if activity.shape:
        batch = f" with a batch of {' x '.join(map(str, activity.shape))} tokens"
    text = f"There is not enough memory for {owner} {activity}{batch} ({amounts}): "
    changes_to_try = itertools.islice(_suggest_changes(cfg, activity, dims, kind), _MAX_SUGGESTIONS)
    suggestions = [_as_overrides(changes) for changes in changes_to_try]
    if not suggestions:
        return text + "no setting would need less: train adapters, a smaller model, or use more or larger devices"
    return text + "set " + ", or ".join(suggestions)


def _as_overrides(changes: Changes) -> str:
    """Return changes as they are written on the command line."""
    return " ".join(f"{key}={value}" for key, value in changes.items())


def _suggest_changes(settings: Any, activity: Activity, dims: ParallelDims, kind: str) -> Iterator[Changes]:
    """Yield changes that need less memory and that the recipe accepts, cheapest first."""
    cfg = SettingsView.of(settings)
    on_cuda = torch.cuda.is_available() and str(cfg.device or "cuda").startswith("cuda")
    if kind == "host" and on_cuda:  # the host's memory holds only what is offloaded to it
        settings_of_offloading = ("fsdp_cpu_offload", "enable_activation_offloading")
        candidates = iter([{name: False} for name in settings_of_offloading if getattr(cfg, name)])
    else:
        candidates = itertools.chain(
            _smaller_steps(cfg, activity), _smaller_dtypes(cfg, on_cuda), _more_shards(cfg, dims)
        )
    has_checks = dataclasses.is_dataclass(cfg.source) and hasattr(cfg.source, "check")
    for changes in candidates:
        if not all(cfg.can_set(key) for key in changes):
            continue
        # The recipe's checks do not read the keys of components, which have dots.
        is_checked = has_checks and not any("." in key for key in changes)
        if is_checked and list(dataclasses.replace(cfg.source, **changes).check()):
            continue
        yield changes


def _smaller_steps(cfg: SettingsView, activity: Activity) -> Iterator[Changes]:
    """Yield changes with fewer tokens or activations."""
    plan = StepPlan.of(cfg)
    if not cfg.enable_activation_checkpointing:
        yield {"enable_activation_checkpointing": True}
    if activity.phase == "validation":
        if (cfg.batch_size_val or plan.batch_size) > 1:
            yield {"batch_size_val": 1}
    elif plan.batch_size > 1:
        # Of the same global batch, so that the run learns the same.
        changes: Changes = {"batch_size": 1}
        if not cfg.optimizer_in_bwd:  # which excludes accumulation
            changes["gradient_accumulation_steps"] = plan.rows_per_step(data_size=1)
        yield changes
    has_adapters = "lora" in f"{cfg.model} {cfg.model_converters}".lower()  # their gradients are small
    if not cfg.optimizer_in_bwd and not has_adapters:
        yield {"optimizer_in_bwd": True}
    longest = cfg.max_seq_len
    # A batch of one row is as long as this row, unlike a padding-free batch of several.
    if longest is None and plan.batch_size == 1 and activity.shape:
        longest = activity.shape[-1]
    if longest is not None and longest > _SHORTEST_TO_HALVE:
        yield {"tokenizer.max_seq_len": longest // 2}


def _smaller_dtypes(cfg: SettingsView, on_cuda: bool) -> Iterator[Changes]:
    """Yield smaller dtypes, or offloading to the host."""
    if cfg.dtype == "fp32":
        yield {"dtype": "bf16"}
    if on_cuda and cfg.enable_activation_checkpointing and not cfg.enable_activation_offloading:
        yield {"enable_activation_offloading": True}


def _more_shards(cfg: SettingsView, dims: ParallelDims) -> Iterator[Changes]:
    """Yield parallelism with a smaller share of weights or activations per device."""
    if dims.world_size == 1:
        return
    if cfg.fsdp_reshard_after_forward is False:
        yield {"fsdp_reshard_after_forward": True}
    # The other dimensions leave another number of processes to sharding: -1 takes all that are left.
    shard_others: Changes = {}
    if cfg.data_parallel_shard_dim != -1:
        shard_others["data_parallel_shard_dim"] = -1
    if dims.dp_replicate > 1:
        yield {"data_parallel_replicate_dim": 1, **shard_others}
    sizes = {"dp_replicate": dims.dp_replicate, "tp": dims.tp, "cp": dims.cp, "ep": dims.ep}
    for name, key in (("cp", "context_parallel_dim"), ("tp", "tensor_parallel_dim")):
        doubled = {**sizes, name: 2 * sizes[name]}
        try:  # raises if the sizes do not fit the number of processes
            ParallelDims(**doubled, dp_shard=-1, world_size=dims.world_size)
        except ParallelDimsError:
            continue
        yield {key: doubled[name], **shard_others}
    if not cfg.fsdp_cpu_offload:
        yield {"fsdp_cpu_offload": True}
