"""Learned tanh gate."""

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
