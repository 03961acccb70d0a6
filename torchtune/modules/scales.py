"""Factors of a layer's output."""

import torch
from torch import Tensor, nn


class Multiplier(nn.Module):
    """Multiplies by a constant.

    Args:
        factor: the constant.
    """

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """Any shape, same dtype."""
        return x * self.factor

    def extra_repr(self) -> str:
        """The constant."""
        return f"{self.factor}"


class OutputScale(nn.Module):
    """Multiplies by ``scale``, a parameter ``[1]`` without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Any shape, same dtype."""
        return self.scaled_by(self.scale, x)

    def scaled_by(self, scale: Tensor, x: Tensor) -> Tensor:
        """:meth:`forward` with another ``scale``."""
        return x * scale
