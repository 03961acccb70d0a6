"""Dtypes of weights and activations."""

import logging
from collections.abc import Generator, Iterable
from contextlib import contextmanager

import torch

from torchtune.utils import UserError, get_device, get_logger, is_simulated, log_rank_zero, onednn_computes

PRECISION_STR_TO_DTYPE: dict[str, torch.dtype] = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}

DTYPE_NAMES = {dtype: name for name, dtype in PRECISION_STR_TO_DTYPE.items()}


class PrecisionError(UserError, ValueError):
    """Unknown dtype, or a dtype that the device does not support."""


def verify_bf16_support(device: torch.device | None = None) -> bool:
    """Return whether ``device`` (default: the best one of this machine) supports bfloat16."""
    if device is None:
        device = get_device()
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    if device.type in ("xpu", "npu"):
        return getattr(torch, device.type).is_bf16_supported()
    if device.type == "mps":
        return torch.backends.mps.is_macos_or_newer(14, 0)
    return True  # a CPU emulates it, if need be: see has_fast_matmul


def get_dtype(dtype: str | None = None, device: torch.device | None = None) -> torch.dtype:
    """Convert ``"fp16"``, ``"bf16"``, ``"fp32"`` or ``"fp64"`` to a torch dtype; None is float32.

    Args:
        dtype: name of the dtype.
        device: device that must support it; by default the best one of this machine.

    Raises:
        PrecisionError: the name is unknown, or the device does not support bfloat16.

    Example:
        >>> torchtune.training.get_dtype("bf16")
        torch.bfloat16
    """
    if dtype is None:
        return torch.float32
    if dtype not in PRECISION_STR_TO_DTYPE:
        raise PrecisionError(f"dtype: '{dtype}' is not known: use one of {', '.join(PRECISION_STR_TO_DTYPE)}.")
    if dtype == "bf16" and not verify_bf16_support(device):
        raise PrecisionError(f"dtype: bf16 was asked for, but {device or 'this device'} lacks it: set dtype=fp32.")
    return PRECISION_STR_TO_DTYPE[dtype]


def has_fast_matmul(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether ``device`` has instructions for matrix products in ``dtype``; otherwise they are emulated.

    On a CPU with only AVX2, emulated bfloat16 is 4 to 15 times slower than float32.

    Example:
        >>> torchtune.training.precision.has_fast_matmul(torch.float32, torch.device("cpu"))
        True
    """
    if is_simulated() or dtype not in (torch.bfloat16, torch.float16):
        return True
    if device.type == "cpu":
        return onednn_computes(dtype)
    if dtype == torch.float16:
        return True
    if device.type == "cuda":
        if not torch.cuda.is_available():  # --dry-run may name a GPU that this machine lacks: assume a current one
            return True
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return verify_bf16_support(device)


def best_dtype(device: torch.device, stored: torch.dtype | None = None) -> str:
    """Return the name of ``stored`` (default: bfloat16) or, if the device only emulates it, of another dtype.

    It is float16 on CUDA (T4, V100) and float32 elsewhere.
    """
    dtype = torch.bfloat16 if stored is None else stored
    if has_fast_matmul(dtype, device):
        return DTYPE_NAMES[dtype]
    return "fp16" if device.type == "cuda" else "fp32"


def choose_dtype(dtype: str | None, device: torch.device, stored: torch.dtype | None = None) -> tuple[str, torch.dtype]:
    """Return name and dtype of a model's weights and activations.

    Args:
        dtype: name from the settings; a warning is logged if the device only emulates it. None means the best dtype of
            the device, see :func:`best_dtype`.
        device: device of the model.
        stored: dtype of the checkpoint's weights; bfloat16 by default.

    Raises:
        PrecisionError: the name is unknown, or the device does not support bfloat16.

    Example:
        >>> torchtune.training.choose_dtype("fp32", torch.device("cpu"))
        ('fp32', torch.float32)
    """
    if dtype is None:
        dtype = best_dtype(device, stored)
    torch_dtype = get_dtype(dtype, device)
    if not has_fast_matmul(torch_dtype, device):
        log_rank_zero(get_logger(), emulation_warning(dtype, device), level=logging.WARNING)
    return dtype, torch_dtype


def emulation_warning(dtype: str, device: torch.device) -> str:
    """Return the warning about a dtype that the device only emulates."""
    name = f"{device.type} device"
    if device.type == "cpu":
        name = "CPU"
    best = best_dtype(device)
    return f"dtype: this {name} only emulates {dtype}, several times slower than {best}: set dtype={best}."


@contextmanager
def set_default_dtype(dtype: torch.dtype) -> Generator[None, None, None]:
    """Make ``dtype`` torch's default dtype inside the block; the previous one is restored even after an error.

    Example:
        >>> with torchtune.training.set_default_dtype(torch.bfloat16):
        ...     torch.zeros(1).dtype
        torch.bfloat16
    """
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


def validate_expected_param_dtype(
    named_params: Iterable[tuple[str, torch.nn.Parameter]],
    dtype: torch.dtype,
    exclude_param_names: list[str] | None = None,
) -> None:
    """Check that every parameter has ``dtype``.

    Args:
        named_params: pairs of name and parameter.
        dtype: the expected dtype.
        exclude_param_names: names of parameters that are not checked.

    Raises:
        ValueError: a parameter has another dtype; the message names it.

    Example:
        >>> torchtune.training.validate_expected_param_dtype(model.named_parameters(), torch.float32)
    """
    excluded = set(exclude_param_names or ())
    for name, param in named_params:
        if name not in excluded and param.dtype != dtype:
            raise ValueError(f"Parameter {name} has type {param.dtype}, expected {dtype}.")
