"""Experts with stacked weights."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from torchtune._lazy import former_names
from torchtune.modules.feed_forward import swiglu
from torchtune.modules.kernels import GROUPED_PRODUCTS, KernelUser, card_of
from torchtune.modules.kernels.grouped import RowGroups, frozen_grouped_mm, grouped_mm, local_experts
from torchtune.modules.low_precision.formats import Stored
from torchtune.utils import get_logger, is_simulated, log_once

_CLAMPED_SLOPE = 1.702  # slope of the sigmoid approximation of GELU


class GroupedExperts(nn.Module, KernelUser):
    """Gated experts: ``down(activation(gate(x)) * up(x))`` with separate matrices for every expert.

    Parameters are ``gate_proj`` and ``up_proj`` ``[e, dim, hidden_dim]`` and ``down_proj`` ``[e, hidden_dim, dim]``.
    Expert parallelism shards dimension 0.

    Args:
        dim: width d of input and output.
        hidden_dim: intermediate width.
        num_experts: number e of experts.
        activation: elementwise activation of the gate.

    Example:
        >>> from torchtune.modules.moe import GroupedExperts
        >>> experts = GroupedExperts(dim=8, hidden_dim=16, num_experts=2)
        >>> experts.reset_parameters()
        >>> experts(torch.randn(5, 8), torch.tensor([3, 2])).shape  # 3 tokens of the first expert, 2 of the second
        torch.Size([5, 8])
    """

    def __init__(
        self, *, dim: int, hidden_dim: int, num_experts: int = 1, activation: Callable[[Tensor], Tensor] = F.silu
    ) -> None:
        super().__init__()
        self.dim = dim
        self.hidden_dim = hidden_dim
        self.num_experts = num_experts
        self.activation = activation
        self.gate_proj = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.up_proj = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the weights as ``nn.Linear`` does."""
        for parameter in self.parameters():
            if not parameter.is_meta:
                bound = parameter.shape[1] ** -0.5
                nn.init.uniform_(parameter, -bound, bound)

    def project(self, name: str, x: Tensor, groups: RowGroups) -> Tensor:
        """Multiply rows ``[t, i]``, sorted by expert, by the parameter called ``name``, ``[e, i, o]``."""
        weight = self.stored_weight(name)
        if isinstance(weight, Stored):
            return frozen_grouped_mm(x, weight, groups)
        return grouped_mm(x, weight, groups)

    def stored_weight(self, name: str) -> Tensor | Stored:
        """Return the parameter called ``name``, possibly in a storage format."""
        return getattr(self, name)

    def choose_kernels(self, device: torch.device, dtype: torch.dtype) -> None:
        """Log how the products of experts are computed; :func:`grouped_mm` chooses the kernel itself."""
        if device.type != "cuda" or is_simulated():
            return
        card = card_of(device)
        if card is None:
            return
        if card.has_grouped_products and dtype == torch.bfloat16:
            log_once(get_logger(), f"Experts on cuda in {dtype}: torch's grouped kernel.")
        else:
            GROUPED_PRODUCTS.choose("Experts", device, dtype)

    def matrix_shapes(self) -> dict[str, tuple[int, int, int]]:
        """Return the names and shapes ``[e, i, o]`` of the stacked matrices."""
        # In the order in which the parameters are registered.
        return {
            "gate_proj": (self.num_experts, self.dim, self.hidden_dim),
            "down_proj": (self.num_experts, self.hidden_dim, self.dim),
            "up_proj": (self.num_experts, self.dim, self.hidden_dim),
        }

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        """Apply the experts to rows ``[t, d]`` sorted by expert, with int64 ``[e]`` rows per expert."""
        groups = RowGroups.of(num_tokens_per_expert)
        gate = self.project("gate_proj", x, groups)
        up = self.project("up_proj", x, groups)
        if self.activation is F.silu or type(self.activation) is nn.SiLU:
            hidden = swiglu(gate, up)
        else:
            hidden = self.activation(gate) * up
        return self.project("down_proj", hidden, groups)

    def extra_repr(self) -> str:
        """Return the sizes for ``repr``."""
        return f"{self.num_experts} experts, {self.dim} -> {self.hidden_dim} -> {self.dim}"


def clamped_swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """Compute ``gate · sigmoid(1.702 gate) · (up + 1)`` of clamped gates and ups, saving only its input.

    Args:
        gate_up: ``[t, 2h]``, gate and up in alternating columns.
        limit: gate is at most ``limit``, up is within ``±limit``.

    Returns:
        Tensor ``[t, h]``.
    """
    if torch.compiler.is_compiling():
        return _clamped_swiglu(gate_up, limit)  # the compiler fuses it and chooses the saved tensors
    return _ClampedSwiGLU.apply(gate_up, limit)


def _clamped_swiglu(gate_up: Tensor, limit: float) -> Tensor:
    gate, up = gate_up.unflatten(-1, (-1, 2)).unbind(-1)  # [t, h] each
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    return gate * torch.sigmoid(_CLAMPED_SLOPE * gate) * (up + 1)


class _ClampedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, limit: float) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.limit = limit
        return _clamped_swiglu(gate_up, limit)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        pairs = gate_up.unflatten(-1, (-1, 2))
        gate, up = pairs.unbind(-1)
        grad_pairs = torch.empty_like(pairs)
        grad_gate, grad_up = grad_pairs.unbind(-1)
        clamped_up = up.clamp(-ctx.limit, ctx.limit)
        scaled_gate = gate.clamp(max=ctx.limit).mul_(_CLAMPED_SLOPE)
        # gate · sigmoid(1.702 gate) is silu(1.702 gate) / 1.702, whose derivative torch has as one operator.
        activated = F.silu(scaled_gate).mul_(1 / _CLAMPED_SLOPE)
        torch.mul(grad, activated, out=grad_up)
        grad_activated = torch.addcmul(grad, grad, clamped_up)
        torch.ops.aten.silu_backward.grad_input(grad_activated, scaled_gate, grad_input=grad_gate)
        # Values that were clamped have no gradient. Clamped values that are equal were not changed.
        grad_gate.masked_fill_(gate > ctx.limit, 0)
        grad_up.masked_fill_(clamped_up != up, 0)
        return grad_pairs.flatten(-2), None


class ClampedExperts(GroupedExperts):
    """Experts of gpt-oss: ``down(gate · sigmoid(1.702 gate) · (up + 1))`` with clamped gate and up.

    Gate and up are the even and the odd columns of one projection. Parameters are ``gate_up_proj``
    ``[e, dim, 2 hidden_dim]`` and ``down_proj`` ``[e, hidden_dim, dim]``, with biases ``gate_up_proj_bias``
    ``[e, 2 hidden_dim]`` and ``down_proj_bias`` ``[e, dim]``.

    Args:
        dim: width d of input and output.
        hidden_dim: intermediate width.
        num_experts: number e of experts.
        limit: clamp gate to at most ``limit`` and up to ``±limit``.

    Example:
        >>> experts = torchtune.modules.moe.ClampedExperts(dim=8, hidden_dim=4, num_experts=2)
        >>> experts(torch.ones(3, 8), torch.tensor([1, 2])).shape  # one token for the first expert
        torch.Size([3, 8])
    """

    def __init__(self, *, dim: int, hidden_dim: int, num_experts: int = 1, limit: float = 7.0) -> None:
        nn.Module.__init__(self)
        self.dim = dim
        self.hidden_dim = hidden_dim
        self.num_experts = num_experts
        self.limit = limit
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, dim, 2 * hidden_dim))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(num_experts, 2 * hidden_dim))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.down_proj_bias = nn.Parameter(torch.empty(num_experts, dim))
        self.reset_parameters()

    def matrix_shapes(self) -> dict[str, tuple[int, int, int]]:
        """Return the names and shapes ``[e, i, o]`` of the stacked matrices."""
        return {
            "gate_up_proj": (self.num_experts, self.dim, 2 * self.hidden_dim),
            "down_proj": (self.num_experts, self.hidden_dim, self.dim),
        }

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        """Apply the experts to rows ``[t, d]`` sorted by expert, with int64 ``[e]`` rows per expert."""
        groups = RowGroups.of(num_tokens_per_expert)
        # With output_size, the host does not wait for the sum of the counts.
        expert_of_row = torch.repeat_interleave(num_tokens_per_expert, output_size=len(x))  # [t]
        gate_up = self.project("gate_up_proj", x, groups)  # [t, 2 * hidden_dim]
        gate_up = gate_up + local_experts(self.gate_up_proj_bias).index_select(0, expert_of_row)
        out = self.project("down_proj", clamped_swiglu(gate_up, self.limit), groups)
        return out + local_experts(self.down_proj_bias).index_select(0, expert_of_row)


class UngatedExperts(GroupedExperts):
    """Experts without a gate: ``down(activation(up(x)))``.

    Args:
        dim: width d of input and output.
        hidden_dim: intermediate width.
        num_experts: number e of experts.
        activation: elementwise activation.

    Example:
        >>> experts = torchtune.modules.moe.UngatedExperts(dim=8, hidden_dim=4, num_experts=2)
        >>> experts(torch.ones(3, 8), torch.tensor([1, 2])).shape  # one token for the first expert
        torch.Size([3, 8])
    """

    def __init__(
        self, *, dim: int, hidden_dim: int, num_experts: int = 1, activation: Callable[[Tensor], Tensor] = F.silu
    ) -> None:
        super().__init__(dim=dim, hidden_dim=hidden_dim, num_experts=num_experts, activation=activation)
        del self.gate_proj

    def matrix_shapes(self) -> dict[str, tuple[int, int, int]]:
        """Return the names and shapes ``[e, i, o]`` of the stacked matrices."""
        shapes = super().matrix_shapes()
        del shapes["gate_proj"]
        return shapes

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        """Apply the experts to rows ``[t, d]`` sorted by expert, with int64 ``[e]`` rows per expert."""
        groups = RowGroups.of(num_tokens_per_expert)
        hidden = self.activation(self.project("up_proj", x, groups))
        return self.project("down_proj", hidden, groups)


__getattr__ = former_names(__name__)
