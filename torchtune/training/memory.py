"""Memory statistics of the device, and activation checkpointing."""

import gc
import logging
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from torchtune._lazy import former_names
from torchtune.utils import ObserverGuard, get_logger, log_once

ACWrapPolicyType = set[type] | Callable[[torch.nn.Module, bool, int], bool]

DEFAULT_LOG_MESSAGE = "Memory stats after model init:"

VALID_BACKENDS_FOR_MEMORY_STATS = ("cuda", "xpu", "npu", "hpu")

_GIB = 1024**3
_guard = ObserverGuard("memory figures")


class CheckpointedForward:
    """Forward that saves only its inputs and recomputes activations in the backward pass.

    It replaces ``module.forward``, so the module keeps its class and parameter names.
    """

    def __init__(self, forward: Callable[..., Any], **kwargs: Any) -> None:
        self.forward = forward
        self.kwargs = {"use_reentrant": False, **kwargs}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward, checkpointed if gradients are enabled."""
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        return checkpoint(self.forward, *args, **self.kwargs, **kwargs)


def checkpoint_module(module: torch.nn.Module, **kwargs: Any) -> torch.nn.Module:
    """Recompute the activations of ``module`` in its backward pass; in place, at most once.

    Args:
        module: module to checkpoint.
        kwargs: arguments of ``torch.utils.checkpoint.checkpoint``, for example ``context_fn``.
    """
    if not isinstance(module.forward, CheckpointedForward):
        module.forward = CheckpointedForward(module.forward, **kwargs)
    return module


def set_activation_checkpointing(model: torch.nn.Module, auto_wrap_policy: ACWrapPolicyType, **kwargs: Any) -> None:
    """Recompute the activations of the selected modules in the backward pass, in place.

    Parameter names do not change. Of nested modules, only the outermost is selected.

    Args:
        model: changed in place.
        auto_wrap_policy: set of module classes, or ``policy(module, recurse, numel) -> bool`` as in FSDP.
        kwargs: arguments of ``torch.utils.checkpoint.checkpoint``.

    Raises:
        ValueError: no module is selected.

    Example:
        >>> torchtune.training.set_activation_checkpointing(model, auto_wrap_policy={type(model.layers[0])})
    """
    if isinstance(auto_wrap_policy, set | frozenset):
        classes = tuple(auto_wrap_policy)

        def is_selected(module: torch.nn.Module) -> bool:
            return isinstance(module, classes)
    else:

        def is_selected(module: torch.nn.Module) -> bool:
            numel = sum(parameter.numel() for parameter in module.parameters())
            return auto_wrap_policy(module, False, numel)

    def checkpoint_selected(module: torch.nn.Module) -> int:
        """Checkpoint the outermost selected modules, and return their number."""
        if is_selected(module):
            checkpoint_module(module, **kwargs)
            return 1  # without its children: they would be recomputed twice
        return sum(checkpoint_selected(child) for child in module.children())

    if checkpoint_selected(model) == 0:
        raise ValueError(f"No module of {type(model).__name__} matches the activation checkpointing policy.")


def cleanup_before_training() -> None:
    """Collect garbage, empty the device's cache and reset the peak memory statistics."""
    gc.collect()
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        getattr(torch, device.type).empty_cache()
        reset_memory_stats(device)


def reset_memory_stats(device: torch.device) -> None:
    """Reset the peaks of ``get_memory_stats``."""
    _guard.call(lambda: _reset_peaks(device))


def _reset_peaks(device: torch.device) -> None:
    if device.type in VALID_BACKENDS_FOR_MEMORY_STATS:
        getattr(torch, device.type).reset_peak_memory_stats(device)
    elif device.type == "cpu" and sys.platform == "linux":
        try:
            Path("/proc/self/clear_refs").write_text("5")  # man 5 proc: resets the peak resident set size
        except OSError as error:
            log_once(
                get_logger(),
                f"Peak memory counts from the start of the process: it cannot be reset here ({error}).",
                logging.DEBUG,
            )


def resident_bytes(field: str = "VmRSS") -> int:
    """Return the resident memory of this process, or with ``"VmHWM"`` its peak; the peak if the present is not known.

    Example:
        >>> torchtune.training.memory.resident_bytes() > 2**20
        True
    """
    status = Path("/proc/self/status")
    if status.exists():  # Linux; lines read "VmRSS:     1234 kB"
        for line in status.read_text().splitlines():
            if line.startswith(f"{field}:"):
                kibibytes = int(line.split()[1])
                return kibibytes * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":  # man 2 getrusage: bytes on macOS, KiB elsewhere
        return peak
    return peak * 1024


def get_memory_stats(device: torch.device, reset_stats: bool = True) -> dict[str, float]:
    """Return peak memory since the last reset, in GiB.

    On an accelerator: ``peak_memory_active`` (tensors in use), ``peak_memory_alloc`` (allocated blocks) and
    ``peak_memory_reserved`` (reserved from the driver; not on MPS). On CPU: ``peak_memory_resident`` (of the process).
    MPS does not record peaks: its values are current memory. Empty, with one warning, if they cannot be read.

    Args:
        device: device to measure.
        reset_stats: reset the peaks after reading.

    Example:
        >>> torchtune.training.get_memory_stats(torch.device("cpu"))
        {...}
    """
    stats = _guard.call(lambda: _read_peaks(device), default={})
    if reset_stats:
        reset_memory_stats(device)
    return stats


def _read_peaks(device: torch.device) -> dict[str, float]:
    if device.type == "cpu":
        return {"peak_memory_resident": resident_bytes("VmHWM") / _GIB}
    if device.type == "mps":
        return {
            "peak_memory_active": torch.mps.current_allocated_memory() / _GIB,
            "peak_memory_alloc": torch.mps.driver_allocated_memory() / _GIB,
        }
    if device.type not in VALID_BACKENDS_FOR_MEMORY_STATS:
        raise ValueError(f"there are no memory statistics for device type '{device.type}'")
    namespace = getattr(torch, device.type)
    return {
        "peak_memory_active": namespace.memory_stats(device).get("active_bytes.all.peak", 0) / _GIB,
        "peak_memory_alloc": namespace.max_memory_allocated(device) / _GIB,
        "peak_memory_reserved": namespace.max_memory_reserved(device) / _GIB,
    }


def log_memory_stats(stats: dict[str, float], message: str = DEFAULT_LOG_MESSAGE) -> None:
    """Log the statistics of ``get_memory_stats``, one per line.

    Args:
        stats: values in GiB.
        message: the first line.
    """
    lines = [f"\t{name.replace('_', ' ')}: {value:.2f} GiB" for name, value in stats.items()]
    get_logger().info("\n".join([message, *lines]))


__getattr__ = former_names(__name__)
