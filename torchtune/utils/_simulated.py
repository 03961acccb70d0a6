"""Whether this process only simulates a run, on fake tensors that stand for those of an accelerator."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_active = False
_on_host = False


def is_simulated() -> bool:
    """Whether this runs inside :func:`simulated`: no file is written, and nothing remote is asked."""
    return _active


def computes_on_cpu(device: "torch.device") -> bool:
    """Whether what is tuned for CPUs applies: a simulation's CPU tensors stand for those of an accelerator."""
    return device.type == "cpu" and not _active


@contextmanager
def simulated() -> Iterator[None]:
    """A block in which tensors on the CPU stand for those of an accelerator."""
    global _active
    before, _active = _active, True
    try:
        yield
    finally:
        _active = before


@contextmanager
def allocates_on_host() -> Iterator[None]:
    """A block in which what is allocated on the CPU lies in host memory in a simulation, too."""
    global _on_host
    before, _on_host = _on_host, True
    try:
        yield
    finally:
        _on_host = before


def is_on_host() -> bool:
    """Whether this runs inside :func:`allocates_on_host`."""
    return _on_host
