"""Output projection with a soft cap on the logits."""

import torch
from torch import Tensor, nn


class CappedLinear(nn.Linear):
    """Output projection with a soft cap.

    Args:
        in_features: d.
        out_features: v.
        softcap: logits become ``softcap * tanh(logits / softcap)``, in float32.
    """

    def __init__(self, in_features: int, out_features: int, softcap: float) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.softcap = softcap

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits: ``[..., d]`` to ``[..., v]``."""
        return soft_cap(super().forward(x), self.softcap)


def soft_cap(logits: Tensor, softcap: float | None) -> Tensor:
    """Compute ``softcap * tanh(logits / softcap)`` in at least float32; with None, return the logits unchanged."""
    if softcap is None:
        return logits
    return softcap * torch.tanh(logits.to(torch.promote_types(logits.dtype, torch.float32)) / softcap)
