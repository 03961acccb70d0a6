"""Flags of a simulated run, in which fake CPU tensors represent accelerator tensors."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_is_active = False
_is_on_host = False


def is_simulated() -> bool:
    """Return whether :func:`simulated` is active; a simulation writes no files and calls no remote service."""
    return _is_active


def computes_on_cpu(device: "torch.device") -> bool:
    """Return whether CPU-specific code paths apply; in a simulation, CPU tensors represent accelerator tensors."""
    return device.type == "cpu" and not _is_active


def launches_kernels(device: "torch.device") -> bool:
    """Return whether an uncompiled operator costs a launch: on CUDA, and in a simulation, which stands for it."""
    return device.type == "cuda" or (device.type == "cpu" and _is_active)


@contextmanager
def simulated() -> Iterator[None]:
    """Context manager in which CPU tensors represent accelerator tensors."""
    global _is_active
    was_active = _is_active
    _is_active = True
    try:
        yield
    finally:
        _is_active = was_active


@contextmanager
def allocates_on_host() -> Iterator[None]:
    """Context manager in which a simulation counts CPU allocations as host memory."""
    global _is_on_host
    was_on_host = _is_on_host
    _is_on_host = True
    try:
        yield
    finally:
        _is_on_host = was_on_host


def is_on_host() -> bool:
    """Return whether :func:`allocates_on_host` is active."""
    return _is_on_host
