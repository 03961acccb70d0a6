"""Scales of a layer's output: a learned gate, a constant and a frozen parameter."""

import torch
from torch import Tensor, nn


class TanhGate(nn.Module):
    """Learned gate ``x * tanh(scale)``; ``scale`` ``[1]`` is initialized to zero, which closes the gate.

    Example:
        >>> torchtune.modules.TanhGate()(torch.ones(2)).tolist()
        [0.0, 0.0]
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Scale a tensor of any shape."""
        return x * self.scale.tanh()


class Multiplier(nn.Module):
    """Multiplication by a constant.

    Args:
        factor: the constant.
    """

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """Multiply a tensor of any shape and dtype."""
        return x * self.factor

    def extra_repr(self) -> str:
        """Return the constant for ``repr``."""
        return f"{self.factor}"


class OutputScale(nn.Module):
    """Multiplication by ``scale``, a parameter ``[1]`` without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply a tensor of any shape."""
        return self.scaled_by(self.scale, x)

    def scaled_by(self, scale: Tensor, x: Tensor) -> Tensor:
        """Compute :meth:`forward` with another ``scale``."""
        return x * scale
