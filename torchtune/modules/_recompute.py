"""Recomputation of cheap functions in the backward pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def recompute(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Call a function without randomness; the backward pass calls it again, so that only its arguments are saved."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
