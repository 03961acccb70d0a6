"""Experts with stacked weights."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtune.modules.feed_forward import swiglu
from torchtune.modules.moe._grouped import frozen_grouped_mm, grouped_mm, of_this_rank
from torchtune.modules.stored_linear import Stored

_CLAMPED_SLOPE = 1.702  # of the sigmoid that stands for GELU


class GroupedExperts(nn.Module):
    """``down(activation(gate(x)) * up(x))`` with separate matrices for every expert.

    Parameters are ``gate_proj`` and ``up_proj`` ``[e, dim, hidden_dim]`` and ``down_proj`` ``[e, hidden_dim, dim]``.
    Expert parallelism shards dimension 0.

    Args:
        dim: d, width of input and output.
        hidden_dim: intermediate width.
        num_experts: e.
        activation: elementwise, applied to the gate.

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
        """Fill the weights as ``nn.Linear`` does; a checkpoint replaces them."""
        for parameter in self.parameters():
            if not parameter.is_meta:
                bound = parameter.shape[1] ** -0.5
                nn.init.uniform_(parameter, -bound, bound)

    def project(self, name: str, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        """Multiply rows ``[t, i]``, sorted by expert, with the parameter called ``name``, ``[e, i, o]``."""
        weight = self.stored_weight(name)
        if isinstance(weight, Stored):
            return frozen_grouped_mm(x, weight, num_tokens_per_expert)
        return grouped_mm(x, weight, num_tokens_per_expert)

    def stored_weight(self, name: str) -> Tensor | Stored:
        """The parameter called ``name``, or what stores it in another form."""
        return getattr(self, name)

    def matrix_shapes(self) -> dict[str, tuple[int, int, int]]:
        """Name of every stack of matrices, and its shape ``[e, i, o]``."""
        wide = (self.num_experts, self.dim, self.hidden_dim)
        return {"gate_proj": wide, "down_proj": (self.num_experts, self.hidden_dim, self.dim), "up_proj": wide}

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        """Rows ``[t, d]`` sorted by expert, and how many each expert has, int64 ``[e]``, to ``[t, d]``."""
        gate = self.project("gate_proj", x, num_tokens_per_expert)
        up = self.project("up_proj", x, num_tokens_per_expert)
        if self.activation is F.silu or type(self.activation) is nn.SiLU:
            hidden = swiglu(gate, up)
        else:
            hidden = self.activation(gate) * up
        return self.project("down_proj", hidden, num_tokens_per_expert)

    def extra_repr(self) -> str:
        """Sizes."""
        return f"{self.num_experts} experts, {self.dim} -> {self.hidden_dim} -> {self.dim}"


class ClampedExperts(GroupedExperts):
    """``down(gate · sigmoid(1.702 gate) · (up + 1))``, where gate is at most ``limit`` and up within ``±limit``.

    Gate and up are the even and the odd columns of one product. Parameters are ``gate_up_proj``
    ``[e, dim, 2 hidden_dim]`` and ``down_proj`` ``[e, hidden_dim, dim]``, each with a bias for every expert,
    ``gate_up_proj_bias`` ``[e, 2 hidden_dim]`` and ``down_proj_bias`` ``[e, dim]``, as in gpt-oss.

    Args:
        dim: d, width of input and output.
        hidden_dim: width in between.
        num_experts: e.
        limit: see above.

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
        """Name of every stack of matrices, and its shape ``[e, i, o]``."""
        return {
            "gate_up_proj": (self.num_experts, self.dim, 2 * self.hidden_dim),
            "down_proj": (self.num_experts, self.hidden_dim, self.dim),
        }

    def project(self, name: str, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        """Multiply rows ``[t, i]``, sorted by expert, with the parameter called ``name``, and add its bias."""
        bias = of_this_rank(getattr(self, f"{name}_bias"))
        bias = bias.repeat_interleave(num_tokens_per_expert, 0, output_size=len(x))
        return super().project(name, x, num_tokens_per_expert) + bias

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        """Rows ``[t, d]`` sorted by expert, and how many each expert has, int64 ``[e]``, to ``[t, d]``."""
        gate, up = self.project("gate_up_proj", x, num_tokens_per_expert).unflatten(-1, (-1, 2)).unbind(-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        hidden = gate * torch.sigmoid(_CLAMPED_SLOPE * gate) * (up + 1)
        return self.project("down_proj", hidden, num_tokens_per_expert)


class UngatedExperts(GroupedExperts):
    """``down(activation(up(x)))``: experts with two matrices, ``up_proj`` and ``down_proj``.

    Args:
        dim: d, width of input and output.
        hidden_dim: width in between.
        num_experts: e.
        activation: elementwise.

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
        """Name of every stack of matrices, and its shape ``[e, i, o]``."""
        return {name: shape for name, shape in super().matrix_shapes().items() if name != "gate_proj"}

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        """Rows ``[t, d]`` sorted by expert, and how many each expert has, int64 ``[e]``, to ``[t, d]``."""
        hidden = self.activation(self.project("up_proj", x, num_tokens_per_expert))
        return self.project("down_proj", hidden, num_tokens_per_expert)


def __getattr__(name: str) -> Any:
    """``LoRAGroupedExperts``, which older code imports from here."""
    if name != "LoRAGroupedExperts":
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    from torchtune.modules.peft.lora_experts import LoRAGroupedExperts  # which imports this module

    return LoRAGroupedExperts
