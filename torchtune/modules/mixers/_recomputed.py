"""Functions that are computed again in the backward pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def recomputed(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """Return ``function(*args)``, of which only ``args`` are saved for the backward pass.

    Without gradients it is a plain call: torch's wrapper takes a tenth of a millisecond, which counts in decoding.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
