"""Gated feed-forward layer of a transformer."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from torchtune.modules.kernels import SWIGLU


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute ``silu(gate) * up`` elementwise (Shazeer 2020); saves only its two inputs for the backward pass.

    Args:
        gate: tensor of any shape.
        up: tensor of the same shape and dtype.

    Returns:
        Tensor of their shape and dtype.

    Example:
        >>> torchtune.modules.swiglu(torch.tensor([0.0, 100.0]), torch.tensor([2.0, 2.0]))
        tensor([  0., 200.])
    """
    if torch.compiler.is_compiling():
        return F.silu(gate) * up  # the compiler fuses it and chooses the saved tensors
    if gate.is_cuda:
        kernel = SWIGLU.choose("SwiGLU", gate.device, gate.dtype)
        if kernel is not None:
            return kernel.apply(gate, up)
    if torch.is_grad_enabled():
        return _SwiGLU.apply(gate, up)
    return F.silu(gate).mul_(up)


class _SwiGLU(torch.autograd.Function):
    """SwiGLU that recomputes ``silu(gate)`` in the backward pass instead of saving it."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        gate, up = ctx.saved_tensors
        needs_gate, needs_up = ctx.needs_input_grad
        grad_up = None
        if needs_up:
            grad_up = F.silu(gate).mul_(grad)
        grad_gate = None
        if needs_gate:
            grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return grad_gate, grad_up


class SquaredReLU(nn.Module):
    """``max(x, 0) ** 2`` (So et al. 2021, arXiv:2109.08668), elementwise."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation; shape and dtype are kept."""
        return F.relu(x).square()


class FeedForward(nn.Module):
    """Feed-forward layer: ``down(activation(gate(x)) * up(x))``, or ``down(activation(gate(x)))`` without ``up_proj``.

    Args:
        gate_proj: projection ``embed_dim -> hidden``; the attribute ``w1``.
        down_proj: projection ``hidden -> embed_dim``; the attribute ``w2``.
        up_proj: projection ``embed_dim -> hidden``; the attribute ``w3``.
        activation: elementwise activation of the gate; by default SiLU.
        gate_scale: factor of the gate.

    Attributes:
        tile_size: number of tokens that are computed at a time; None for all, see :class:`TiledMLP`.

    Example:
        >>> linear = torch.nn.Linear
        >>> mlp = torchtune.modules.FeedForward(gate_proj=linear(8, 16), up_proj=linear(8, 16), down_proj=linear(16, 8))
        >>> mlp(torch.ones(2, 3, 8)).shape
        torch.Size([2, 3, 8])
    """

    def __init__(
        self,
        *,
        gate_proj: nn.Module,
        down_proj: nn.Module,
        up_proj: nn.Module | None = None,
        activation: nn.Module | None = None,
        gate_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.w1 = gate_proj
        self.w2 = down_proj
        self.w3 = up_proj
        self.activation = nn.SiLU() if activation is None else activation
        self.gate_scale = gate_scale
        self.tile_size: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to ``[..., embed_dim]``."""
        if self.tile_size is None or x.shape[-2] <= self.tile_size:
            return self._compute(x)
        outputs = []
        for tile in x.split(self.tile_size, dim=-2):
            # Also within a checkpointed layer: its recomputation would save the hidden activations of all tiles.
            outputs.append(checkpoint(self._compute, tile, use_reentrant=False))
        return torch.cat(outputs, dim=-2)

    def _compute(self, x: Tensor) -> Tensor:
        """Apply the layer to all tokens of ``[..., embed_dim]`` at once."""
        gate = self.w1(x)  # [..., hidden]
        if self.gate_scale != 1.0:
            gate = gate * self.gate_scale
        if self.w3 is None:
            return self.w2(self.activation(gate))
        up = self.w3(x)  # [..., hidden]
        if type(self.activation) is nn.SiLU:
            return self.w2(swiglu(gate, up))
        return self.w2(self.activation(gate) * up)
