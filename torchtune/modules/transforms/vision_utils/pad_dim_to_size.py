"""Padding of one dimension."""

import torch
from torch.nn import functional as F

from torchtune.data import DataError


def pad_dim_to_size(input: torch.Tensor, size: int, dim: int, *, fill: float = 0.0) -> torch.Tensor:
    """Pad one dimension of a tensor at its end.

    Args:
        input: tensor of any shape.
        size: size of the dimension after padding.
        dim: dimension to pad.
        fill: padding value.

    Raises:
        DataError: the dimension is longer than ``size``.

    Example:
        >>> from torchtune.modules.transforms.vision_utils.pad_dim_to_size import pad_dim_to_size
        >>> pad_dim_to_size(torch.ones(1, 2), 3, 0).shape
        torch.Size([3, 2])
    """
    missing = size - input.shape[dim]
    if missing < 0:
        raise DataError(f"Dimension {dim} of a tensor {tuple(input.shape)} is longer than the size {size} to pad to.")
    behind = input.dim() - 1 - dim % input.dim()
    return F.pad(input, (0, 0) * behind + (0, missing), value=fill) if missing else input
