"""Gated RMSNorm over groups of channels."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class _GatedNorm(torch.autograd.Function):
    """Gated norm that saves only its arguments for the backward pass, instead of five float32 tensors of that size."""

    @staticmethod
    def forward(ctx, x: Tensor, gate: Tensor, scale: Tensor, groups: int, eps: float) -> Tensor:
        ctx.save_for_backward(x, gate, scale)
        ctx.groups, ctx.eps = groups, eps
        return _gated_norm(x, gate, scale, groups, eps)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, scale = ctx.saved_tensors
        wide, wide_gate = x.float(), gate.float()
        sigmoid = wide_gate.sigmoid()
        silu = wide_gate * sigmoid
        gated = (wide * silu).unflatten(-1, (ctx.groups, -1))
        rstd = torch.rsqrt(gated.square().mean(-1, keepdim=True) + ctx.eps)
        normed = gated.mul_(rstd)
        d_scale = (grad * normed.flatten(-2)).flatten(0, -2).sum(0)
        d_normed = (grad * scale.float()).unflatten(-1, (ctx.groups, -1))
        d_gated = (d_normed - normed * (d_normed * normed).mean(-1, keepdim=True)).mul_(rstd).flatten(-2)
        d_gate = d_gated * wide * (sigmoid + silu * (1 - sigmoid))
        return (d_gated * silu).to(x.dtype), d_gate.to(gate.dtype), d_scale.to(scale.dtype), None, None


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
        """Multiply ``x`` ``[..., dim]`` by ``silu(gate)`` and normalize, in float32; return the dtype of ``x``."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return _gated_norm(x, gate, self.scale, self.groups, self.eps)
        return _GatedNorm.apply(x, gate, self.scale, self.groups, self.eps)
