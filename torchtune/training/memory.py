"""Memory statistics of the device."""

import gc
import logging
import resource
import sys
from pathlib import Path

import torch

from torchtune._lazy import former_names
from torchtune.training.activations import ACWrapPolicyType as ACWrapPolicyType  # the public path of both
from torchtune.training.activations import set_activation_checkpointing as set_activation_checkpointing
from torchtune.utils import ObserverGuard, get_logger, log_once

DEFAULT_LOG_MESSAGE = "Memory stats after model init:"

VALID_BACKENDS_FOR_MEMORY_STATS = ("cuda", "xpu", "npu", "hpu")

_GIB = 1024**3
_guard = ObserverGuard("memory figures")


def cleanup_before_training() -> None:
    """Collect garbage, empty the device's cache and reset the peak memory statistics."""
    gc.collect()
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        namespace = getattr(torch, device.type)
        namespace.empty_cache()
        reset_memory_stats(device)


def reset_memory_stats(device: torch.device) -> None:
    """Reset the peaks of ``get_memory_stats``."""

    def reset() -> None:
        if device.type in VALID_BACKENDS_FOR_MEMORY_STATS:
            namespace = getattr(torch, device.type)
            namespace.reset_peak_memory_stats(device)
        elif device.type == "cpu" and sys.platform == "linux":
            try:
                Path("/proc/self/clear_refs").write_text("5")  # man 5 proc: resets the peak resident set size
            except OSError as error:
                log_once(
                    get_logger(),
                    f"Peak memory counts from the start of the process: it cannot be reset here ({error}).",
                    logging.DEBUG,
                )

    _guard.call(reset)


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

    def read() -> dict[str, float]:
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
        # The statistics are empty until the first allocation.
        active_bytes = namespace.memory_stats(device).get("active_bytes.all.peak", 0)
        return {
            "peak_memory_active": active_bytes / _GIB,
            "peak_memory_alloc": namespace.max_memory_allocated(device) / _GIB,
            "peak_memory_reserved": namespace.max_memory_reserved(device) / _GIB,
        }

    stats = _guard.call(read, default={})
    if reset_stats:
        reset_memory_stats(device)
    return stats


def log_memory_stats(stats: dict[str, float], message: str = DEFAULT_LOG_MESSAGE) -> None:
    """Log the statistics of ``get_memory_stats``, one per line.

    Args:
        stats: values in GiB.
        message: the first line.
    """
    lines = [f"\t{name.replace('_', ' ')}: {value:.2f} GiB" for name, value in stats.items()]
    get_logger().info("\n".join([message, *lines]))


__getattr__ = former_names(__name__)
