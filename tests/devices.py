"""The device on which the tests run recipes, and on which tests of computing rooms have their tensors and modules.

A test makes tensors and modules as usual, and ``make test DEVICE=cuda`` puts them on the device. What the library makes
while it computes stays where the library puts it: a tensor made without ``device=`` fails the test, as it would fail a
run. ``ON_HOST = True`` in a file of tests leaves its tensors alone.
"""

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

# `make test DEVICE=cuda` sets it; children and forks of the tests' process have it too.
DEVICE = os.environ.get("TORCHTUNE_TEST_DEVICE", "cpu")

_TESTS = str(Path(__file__).parent)
# Other rooms read text and files, on the host.
_COMPUTING = tuple(
    f"{_TESTS}/torchtune/{room}/"
    for room in ("evaluation", "generation", "models", "modules", "rlhf", "supervision", "training")
)
# Their modules are on the device.
_PACKAGES = ("torch", "torchao", "torchtune", "transformers")
_FACTORIES = (
    "arange empty eye full linspace normal ones rand randint randn randperm scalar_tensor tensor "
    "tril_indices triu_indices zeros"
).split()


def own_device() -> torch.device:
    """The device of this process; each of several ranks has a CUDA device of its own."""
    from torchtune.utils import get_device

    return get_device(DEVICE)


def random_state() -> torch.Tensor:
    """The state of the device's generator, from which random numbers that have no generator of their own come."""
    return torch.get_rng_state() if DEVICE == "cpu" else torch.get_device_module(DEVICE).get_rng_state()


def _is_made_for_a_test(maker: FrameType) -> bool:
    """Whether a tensor is made by a test of a computing room, or by a module that such a test builds."""
    frame: FrameType | None = maker
    package = maker.f_globals["__name__"].partition(".")[0]
    is_of_a_module = False
    while frame is not None and not frame.f_code.co_filename.startswith(_TESTS):
        if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), nn.Module):
            is_of_a_module = True
        frame = frame.f_back
    if frame is None or not (frame is maker or (is_of_a_module and package in _PACKAGES)):
        return False
    return frame.f_code.co_filename.startswith(_COMPUTING) and not frame.f_globals.get("ON_HOST")


def _on_device(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A factory of tensors that draws values on the CPU, so that a seed means the same everywhere, and sends them."""

    @functools.wraps(factory)
    def make(*args: Any, **options: Any) -> torch.Tensor:
        is_placed = options.get("device") is not None or options.get("out") is not None
        if is_placed or torch.compiler.is_compiling() or not _is_made_for_a_test(sys._getframe(1)):
            return factory(*args, **options)
        if torch._C._len_torch_function_stack():  # within torch.device("meta"), for example
            return factory(*args, **options)
        requires_grad = options.pop("requires_grad", False)
        return factory(*args, **options).to(DEVICE).requires_grad_(requires_grad)

    return make


def put_tensors_on_device() -> None:
    """From now on, tensors and modules of tests are on ``DEVICE``, unless they say where."""
    with torch.device("cpu"):
        torch.empty(0)  # torch.device as a context looks the factories up now, once: as they are
    for name in _FACTORIES:
        setattr(torch, name, _on_device(getattr(torch, name)))
