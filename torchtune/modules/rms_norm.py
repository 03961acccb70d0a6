"""Normalization and scales of activations: RMSNorm, layer normalization in float32, a gate, constant factors."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from torchtune.utils import is_simulated, launches_kernels


class _SimulatedNorm(torch.autograd.Function):
    """Norm that allocates and saves what torch's operator does on an accelerator, without computing values.

    In a simulation, CPU tensors stand for those of an accelerator; the operator itself keeps float32 copies on a CPU.
    """

    @staticmethod
    def forward(ctx, x: Tensor, scale: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, scale = ctx.saved_tensors
        grad_scale = None
        if scale is not None:
            grad_scale = torch.zeros_like(scale)
        return torch.zeros_like(x), grad_scale


def _fused_norm(x: Tensor, eps: float, scale: Tensor | None = None) -> Tensor:
    if is_simulated():
        return _SimulatedNorm.apply(x, scale)
    return F.rms_norm(x, (x.shape[-1],), scale, eps)


def normalize(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute ``x / rms(x)`` and, for :func:`normalize_backward`, ``1 / rms(x)``, float32 ``[..., 1]``."""
    if is_simulated():
        rstd = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
        return x.clone(), rstd
    return torch.ops.aten._fused_rms_norm(x, x.shape[-1:], None, eps)


def normalize_backward(grad: Tensor, x: Tensor, rstd: Tensor) -> Tensor:
    """Compute the gradient of ``x`` from that of ``x / rms(x)`` and ``rstd`` of :func:`normalize`, in float32."""
    if is_simulated():
        return torch.zeros_like(x)
    if x.is_cuda:  # a CPU has no such operator
        needs_grads = [True, False]  # of x, and of the scale, which this norm has not
        grad_x, _ = torch.ops.aten._fused_rms_norm_backward(grad, x, x.shape[-1:], rstd, None, needs_grads)
        return grad_x
    normed = x * rstd  # [..., d]
    # The part of the gradient along the normed row changes its length, which the norm takes away again.
    part_along_row = (grad * normed).mean(-1, keepdim=True)  # [..., 1]
    return (grad - normed * part_along_row).mul_(rstd)


class _ScaledNorm(torch.autograd.Function):
    """Norm and scale in two launches, and their backward pass in one.

    The operators apart take four in the backward pass, round the gradient between them, and keep the norm.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, eps: float) -> Tensor:
        normed, rstd = normalize(x, eps)
        ctx.save_for_backward(x, scale, rstd)
        return normed.mul_(scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, rstd = ctx.saved_tensors
        needs_x, needs_scale, _ = ctx.needs_input_grad
        if not is_simulated():
            grad_x, grad_scale = torch.ops.aten._fused_rms_norm_backward(
                grad, x, x.shape[-1:], rstd, scale, [needs_x, needs_scale]
            )
            return grad_x, grad_scale, None
        grad_x = None
        if needs_x:
            grad_x = torch.zeros_like(x)
        grad_scale = None
        if needs_scale:
            grad_scale = torch.zeros_like(scale)
        return grad_x, grad_scale, None


def rms_norm(x: Tensor, eps: float = 1e-6, scale: Tensor | None = None) -> Tensor:
    """Compute ``x / sqrt(mean(x², last dimension) + eps) * scale`` in float32 (Zhang & Sennrich 2019).

    Args:
        x: ``[..., d]``, any floating dtype.
        eps: added to the mean square.
        scale: ``[d]`` or ``None`` for no scaling.

    Returns:
        Tensor ``[..., d]`` of the dtype of ``x``.

    Example:
        >>> torchtune.modules.rms_norm(torch.tensor([3.0, -1.0]))
        tensor([ 1.3416, -0.4472])
    """
    if scale is None:
        return _fused_norm(x, eps)
    # The compiler and a CPU fuse the two backward passes of norm and scale themselves.
    trains_eagerly = not torch.compiler.is_compiling() and torch.is_grad_enabled()
    if trains_eagerly and launches_kernels(x.device):
        is_sharded = hasattr(x, "placements") or hasattr(scale, "placements")
        if x.dtype == scale.dtype and not is_sharded:  # the operator takes one dtype, and no DTensors
            return _ScaledNorm.apply(x, scale, eps)
    # The operator computes in float32 and rounds its result; checkpoints expect this rounding before the scale.
    return _fused_norm(x, eps) * scale


class RMSNorm(nn.Module):
    """:func:`rms_norm` with a learned ``scale``.

    Args:
        dim: size of the last dimension.
        eps: added to the mean square.
        unit_offset: scale by ``1 + scale``, with ``scale`` initialized to zero, and round after scaling (Gemma).
        rounds_last: round after scaling, not before (Gemma 4).

    Example:
        >>> torchtune.modules.RMSNorm(4)(torch.tensor([[3.0, 3.0, 3.0, 3.0]]))
        tensor([[1.0000, 1.0000, 1.0000, 1.0000]], grad_fn=...)
    """

    def __init__(self, dim: int, eps: float = 1e-6, *, unit_offset: bool = False, rounds_last: bool = False) -> None:
        super().__init__()
        self.normalized_shape = (dim,)
        self.eps = eps
        self.unit_offset = unit_offset
        self.rounds_last = rounds_last or unit_offset
        self.scale = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset the scale to a factor of one."""
        if self.unit_offset:  # the factor is 1 + scale
            nn.init.zeros_(self.scale)
        else:
            nn.init.ones_(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``[..., dim]``; shape and dtype are kept."""
        return self.scaled_by(self.scale, x)

    def scaled_by(self, scale: Tensor, x: Tensor) -> Tensor:
        """Compute :meth:`forward` with another ``scale`` ``[dim]``."""
        if not self.rounds_last:
            return rms_norm(x, self.eps, scale)
        if not self.unit_offset and scale.dtype == x.dtype:
            return _fused_norm(x, self.eps, scale)  # in float32, rounded once at the end
        factor = scale.float()
        if self.unit_offset:
            factor = factor + 1.0
        # Norm and scale in float32, so that only the result is rounded.
        return _fused_norm(x.float(), self.eps, factor).to(x.dtype)

    def extra_repr(self) -> str:
        """Return size and eps for ``repr``."""
        return f"{self.normalized_shape[0]}, eps={self.eps}"


class Fp32LayerNorm(nn.LayerNorm):
    """``torch.nn.LayerNorm`` computed in float32, with the same arguments.

    Example:
        >>> torchtune.modules.Fp32LayerNorm(2)(torch.tensor([[1.0, 3.0]], dtype=torch.bfloat16)).dtype
        torch.bfloat16
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``[..., d]``; shape and dtype are kept."""
        # A layer without elementwise_affine has neither weight nor bias.
        weight = None if self.weight is None else self.weight.float()
        bias = None if self.bias is None else self.bias.float()
        normed = F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps)
        return normed.to(x.dtype)


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
