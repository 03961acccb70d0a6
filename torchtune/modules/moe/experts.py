"""Experts with stacked weights."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from torchtune._lazy import former_names
from torchtune.modules.feed_forward import swiglu
from torchtune.modules.kernels import GROUPED_PRODUCTS, KernelUser, card_of
from torchtune.modules.kernels.grouped import (
    RowGroups,
    frozen_grouped_mm,
    grouped_mm,
    local_experts,
    repeat_by_group,
)
from torchtune.modules.low_precision.formats import Stored
from torchtune.modules.moe.frozen_experts import Adapter, Bias, Selection, apply_frozen_experts
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

    # Matrices that multiply the input; ``down_proj`` multiplies the output of the activation.
    input_matrices: ClassVar[tuple[str, ...]] = ("gate_proj", "up_proj")
    # Whether frozen experts save only their inputs for the backward pass; activation checkpointing sets it.
    recomputes: bool = False

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

    def project(
        self, name: str, x: Tensor, groups: RowGroups, weights: Mapping[str, Tensor | Stored] | None = None
    ) -> Tensor:
        """Multiply rows by their expert's matrix, and add an adapter's update and a bias.

        Args:
            name: name of the matrices, ``[e, i, o]``.
            x: rows ``[t, i]``, sorted by expert.
            groups: the rows of each expert.
            weights: stacked parameters by name; by default those of this module.

        Returns:
            Tensor ``[t, o]``.
        """
        if weights is None:
            weights = self.stacked_weights()
        weight = weights[name]
        if isinstance(weight, Stored):  # frozen, in a format such as 4 bits
            out = frozen_grouped_mm(x, weight, groups)
        else:
            out = grouped_mm(x, weight, groups)
        adapter = self.adapter(name, weights)
        if adapter is not None:
            adapter_x = x
            mask = self.draw_dropout_mask(x)
            if mask is not None:  # dropout is on the adapter's input alone
                adapter_x = x * mask
            low = grouped_mm(adapter_x, adapter.a, groups)  # [t, rank]
            low = low * adapter.scaling  # before B, because it is narrow
            out = out + grouped_mm(low, adapter.b, groups)
        bias = self.bias(name, weights)
        if bias is not None:
            out = out + repeat_by_group(bias.values, groups, len(x))
        return out

    def bias(self, name: str, weights: Mapping[str, Tensor | Stored]) -> Bias | None:
        """Return the bias of the product with the matrix called ``name``, out of the parameters ``weights``."""
        return None

    def adapter(self, name: str, weights: Mapping[str, Tensor | Stored]) -> Adapter | None:
        """Return the adapter of the matrix called ``name``, out of the parameters ``weights``."""
        return None

    def draw_dropout_mask(self, x: Tensor) -> Tensor | None:
        """Return the factors of an adapter's input ``x``, None without dropout."""
        return None

    def activate(self, *projected: Tensor) -> Tensor:
        """Compute the input of ``down_proj``, ``[t, hidden_dim]``, from the outputs of :attr:`input_matrices`."""
        gate, up = projected
        if self.activation is F.silu or type(self.activation) is nn.SiLU:
            return swiglu(gate, up)
        return self.activation(gate) * up

    def stored_weight(self, name: str) -> Tensor | Stored:
        """Return the parameter called ``name``, possibly in a storage format."""
        return getattr(self, name)

    def stacked_weights(self) -> dict[str, Tensor | Stored]:
        """Return this rank's part of the stacked parameters by name, the matrices possibly in a storage format."""
        weights: dict[str, Tensor | Stored] = {}
        for name in self.matrix_shapes():
            weight = self.stored_weight(name)
            if isinstance(weight, Stored):
                local_tensors = tuple(map(local_experts, weight.tensors))
                weights[name] = weight._replace(tensors=local_tensors)
            else:
                weights[name] = local_experts(weight)
        for name, parameter in self.named_parameters():
            if name not in weights and parameter.is_floating_point():  # tensors that store a matrix are integers
                weights[name] = local_experts(parameter)
        return weights

    def has_frozen_matrices(self) -> bool:
        """Return whether no matrix is trained; adapters and biases may be."""
        for name in self.matrix_shapes():
            weight = self.stored_weight(name)
            if isinstance(weight, Tensor) and weight.requires_grad:
                return False
        return True

    def draws_random_numbers(self) -> bool:
        """Return whether a forward pass draws random numbers, which a recomputation has to repeat."""
        return False

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

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor, selection: Selection | None = None) -> Tensor:
        """Apply the experts.

        Args:
            x: rows ``[t, d]`` sorted by expert; with ``selection``, tokens in any order.
            num_tokens_per_expert: rows per expert, int64 ``[e]``.
            selection: the experts of each token, which frozen experts alone take; then outputs are summed by token.

        Returns:
            Tensor ``[t, d]``.
        """
        if selection is not None or self.computes_frozen():
            return apply_frozen_experts(self, x, num_tokens_per_expert, selection)
        groups = RowGroups.of(num_tokens_per_expert)
        weights = self.stacked_weights()
        projected = [self.project(name, x, groups, weights) for name in self.input_matrices]
        hidden = self.activate(*projected)  # [t, hidden_dim]
        return self.project("down_proj", hidden, groups, weights)  # [t, d]

    def computes_frozen(self) -> bool:
        """Return whether a call takes a :class:`Selection`: experts that are frozen, and not being compiled."""
        # The compiler fuses separate operators, and chooses the saved tensors.
        return not torch.compiler.is_compiling() and self.has_frozen_matrices()

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
    pairs = gate_up.unflatten(-1, (-1, 2))  # [t, h, 2]
    gate, up = pairs.unbind(-1)  # [t, h] each
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    activated = gate * torch.sigmoid(_CLAMPED_SLOPE * gate)
    return torch.addcmul(activated, activated, up)


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
        pairs = gate_up.unflatten(-1, (-1, 2))  # [t, h, 2]
        gate, up = pairs.unbind(-1)  # [t, h] each
        # Views of one tensor, into which the products below write: the gradient need not be put together.
        grad_pairs = torch.empty_like(pairs)
        grad_gate, grad_up = grad_pairs.unbind(-1)
        clamped_up = up.clamp(-ctx.limit, ctx.limit)
        scaled_gate = gate.clamp(max=ctx.limit).mul_(_CLAMPED_SLOPE)
        # gate · sigmoid(1.702 gate) is silu(1.702 gate) / 1.702, whose derivative torch has as one operator.
        activated = F.silu(scaled_gate).mul_(1 / _CLAMPED_SLOPE)
        torch.mul(grad, activated, out=grad_up)
        grad_activated = torch.addcmul(grad, grad, clamped_up)  # grad · (up + 1)
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

    input_matrices: ClassVar[tuple[str, ...]] = ("gate_up_proj",)

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

    def bias(self, name: str, weights: Mapping[str, Tensor | Stored]) -> Bias | None:
        """Return the bias of the product with the matrix called ``name``."""
        return Bias(f"{name}_bias", weights[f"{name}_bias"])

    def activate(self, *projected: Tensor) -> Tensor:
        """Compute the input of ``down_proj`` from the outputs of ``gate_up_proj``."""
        (gate_up,) = projected
        return clamped_swiglu(gate_up, self.limit)


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

    input_matrices: ClassVar[tuple[str, ...]] = ("up_proj",)

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

    def activate(self, *projected: Tensor) -> Tensor:
        """Compute the input of ``down_proj`` from the outputs of ``up_proj``."""
        (up,) = projected
        return self.activation(up)


__getattr__ = former_names(__name__)
