"""Gated RMSNorm over groups of channels."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtune.modules.mixers._recomputed import recomputed


def _gated_norm(x: Tensor, gate: Tensor, scale: Tensor, groups: int, eps: float) -> Tensor:
    gated = (x.float() * F.silu(gate.float())).unflatten(-1, (groups, -1))
    return F.rms_norm(gated, gated.shape[-1:], eps=eps).flatten(-2).to(x.dtype) * scale


class GatedGroupNorm(nn.Module):
    """Gated RMSNorm ``scale * y / rms(y)`` for ``y = x * silu(gate)``, over groups of channels.

    Args:
        dim: number of channels.
        groups: number of groups of consecutive channels; divides ``dim``.
        eps: added to the mean square.
    """

    def __init__(self, dim: int, groups: int, eps: float) -> None:
        super().__init__()
        self.groups, self.eps = groups, eps
        self.scale = nn.Parameter(torch.ones(dim))

    def reset_parameters(self) -> None:
        """Set the scale to 1."""
        nn.init.ones_(self.scale)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalize ``x`` ``[..., dim]``, gated by ``gate`` ``[..., dim]``, in float32; the dtype of ``x`` is kept."""
        # Saves only the arguments for the backward pass, not five float32 tensors of their size.
        return recomputed(_gated_norm, x, gate, self.scale, self.groups, self.eps)
