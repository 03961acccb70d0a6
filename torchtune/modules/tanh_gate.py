"""A learned gate."""

import torch
from torch import Tensor, nn


class TanhGate(nn.Module):
    """``x * tanh(scale)`` with a learned number ``scale`` ``[1]``, which starts at zero: the gate is closed.

    Example:
        >>> torchtune.modules.TanhGate()(torch.ones(2)).tolist()
        [0.0, 0.0]
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Any shape, same dtype."""
        return x * self.scale.tanh()
