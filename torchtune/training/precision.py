"""Number types of weights and activations."""

from collections.abc import Generator, Iterable
from contextlib import contextmanager

import torch

from torchtune.utils import UserError, get_device

PRECISION_STR_TO_DTYPE: dict[str, torch.dtype] = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


class PrecisionError(UserError, ValueError):
    """A type that does not exist, or that the device does not compute in."""


def verify_bf16_support(device: torch.device | None = None) -> bool:
    """Whether ``device`` (``None``: the best one of this machine) computes in bfloat16."""
    device = get_device() if device is None else device
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    if device.type in ("xpu", "npu"):
        return getattr(torch, device.type).is_bf16_supported()
    if device.type == "mps":
        return torch.backends.mps.is_macos_or_newer(14, 0)
    return True


def get_dtype(dtype: str | None = None, device: torch.device | None = None) -> torch.dtype:
    """Turn ``"fp16"``, ``"bf16"``, ``"fp32"`` or ``"fp64"`` into a torch type; ``None`` is float32.

    Args:
        dtype: the name.
        device: where it will be used; ``None`` checks nothing but the name for a CPU-only machine.

    Raises:
        PrecisionError: the name is unknown (a ``ValueError`` too), or the device does not compute in bfloat16.

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


@contextmanager
def set_default_dtype(dtype: torch.dtype) -> Generator[None, None, None]:
    """Make ``dtype`` torch's default type inside the block; the old one comes back even after an error.

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
        dtype: the expected type.
        exclude_param_names: names that are not checked.

    Raises:
        ValueError: a parameter has another type; the message names it.

    Example:
        >>> torchtune.training.validate_expected_param_dtype(model.named_parameters(), torch.float32)
    """
    excluded = set(exclude_param_names or ())
    for name, param in named_params:
        if name not in excluded and param.dtype != dtype:
            raise ValueError(f"Parameter {name} has type {param.dtype}, expected {dtype}.")
