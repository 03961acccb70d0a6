"""Experts with LoRA adapters."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtune.modules.conversion import change_class
from torchtune.modules.low_precision.formats import Stored
from torchtune.modules.moe.experts import GroupedExperts
from torchtune.modules.moe.frozen_experts import Adapter
from torchtune.modules.peft.lora import check_adapter_numbers, lora_scaling
from torchtune.utils import fill_from_cpu


class LoRAGroupedExperts(GroupedExperts):
    """Frozen experts with a LoRA adapter per expert and matrix: ``x W + (alpha / rank) · x A B``.

    Besides the weights of :class:`GroupedExperts` it has ``lora_gate_a`` ``[e, dim, rank]``, ``lora_gate_b``
    ``[e, rank, hidden_dim]``, and the same for ``up`` and ``down``. :meth:`from_experts` also wraps experts with other
    matrices, and their adapters are named after these.

    Args:
        dim: d, width of input and output.
        hidden_dim: intermediate width.
        rank: rank of the adapters.
        alpha: updates are scaled by alpha / rank.
        dropout: dropout on the adapters' input, in training.
        num_experts: e.
        activation: elementwise activation of the gate.

    Raises:
        ConversionError: ``rank`` is below 1, ``alpha`` is 0, or ``dropout`` is outside [0, 1).

    Example:
        >>> experts = torchtune.modules.moe.LoRAGroupedExperts(dim=8, hidden_dim=4, rank=2, alpha=4, num_experts=2)
        >>> len(experts.adapter_params())
        6
    """

    # initialize_parameters() does not read the base weights.
    initialize_reads_base: ClassVar[bool] = False

    def __init__(
        self,
        *,
        dim: int,
        hidden_dim: int,
        rank: int,
        alpha: float,
        dropout: float = 0.0,
        num_experts: int = 1,
        activation: Callable[[Tensor], Tensor] = F.silu,
    ) -> None:
        super().__init__(dim=dim, hidden_dim=hidden_dim, num_experts=num_experts, activation=activation)
        self._set_up(rank, alpha, dropout, self.gate_proj.dtype)

    def _set_up(self, rank: int, alpha: float, dropout: float, dtype: torch.dtype) -> None:
        """Freeze the weights, and create an adapter for each matrix."""
        check_adapter_numbers(rank, alpha, dropout)
        self.requires_grad_(False)  # before the adapters, which are trained
        self.rank = rank
        self.alpha = alpha
        self.scaling = lora_scaling(rank, alpha)
        self.disabled = False
        self.dropout = nn.Dropout(p=dropout)
        device = next(self.parameters()).device
        for name, (experts, inputs, outputs) in self.matrix_shapes().items():
            a = torch.empty(experts, inputs, rank, dtype=dtype, device=device)
            b = torch.empty(experts, rank, outputs, dtype=dtype, device=device)
            a_name, b_name = _adapter_names(name)
            setattr(self, a_name, nn.Parameter(a))
            setattr(self, b_name, nn.Parameter(b))
        self.initialize_parameters()

    @classmethod
    def from_experts(
        cls, experts: GroupedExperts, *, rank: int, alpha: float, dropout: float = 0.0
    ) -> "LoRAGroupedExperts":
        """Wrap ``experts``: the new module shares their weights, frozen, with device and dtype unchanged.

        Args:
            experts: plain or quantized experts.
            rank: rank of the adapters.
            alpha: updates are scaled by alpha / rank.
            dropout: dropout on the adapters' input, in training.
        """
        adapted_class = cls
        if type(experts) is not GroupedExperts:
            adapted_class = _adapt_stored_class(cls, type(experts))
        new = change_class(experts, adapted_class)
        new._set_up(rank, alpha, dropout, experts.stored_weight("down_proj").dtype)
        return new.train(experts.training)

    def without_adapter(self) -> GroupedExperts:
        """Return the experts without their adapters; they share the frozen weights."""
        plain = change_class(self, getattr(self, "stored_kind", GroupedExperts))
        for name in (*self.adapter_params(), "dropout"):
            delattr(plain, name)
        for name in ("rank", "alpha", "scaling", "disabled"):
            plain.__dict__.pop(name)
        return plain

    def reset_parameters(self) -> None:
        """Initialize the base weights; no-op once the adapters exist."""
        if not hasattr(self, "rank"):
            super().reset_parameters()

    def initialize_parameters(self) -> None:
        """Initialize the adapters: A as in LoRA (Kaiming uniform), B zero. No-op on meta."""
        for name in self.adapter_params():
            parameter = getattr(self, name)
            if parameter.is_meta:
                continue
            if name.endswith("_a"):
                bound = parameter.shape[1] ** -0.5  # of [e, i, rank]: Kaiming's bound for i inputs and a = √5
                fill_from_cpu(parameter, partial(nn.init.uniform_, a=-bound, b=bound))
            else:
                nn.init.zeros_(parameter)

    def adapter_params(self) -> list[str]:
        """Return the names of the adapters' parameters, relative to this module."""
        names = []
        for matrix in self.matrix_shapes():
            names += _adapter_names(matrix)
        return names

    @torch.no_grad()
    def merged_weight(self, name: str, weight: Tensor) -> Tensor:
        """Merge the adapters into ``weight`` ``[e, i, o]``, the parameter called ``name``, in at least float32."""
        if name not in self.matrix_shapes():
            return weight
        compute = torch.promote_types(weight.dtype, torch.float32)
        a_name, b_name = _adapter_names(name)
        a = getattr(self, a_name).to(weight.device, compute)  # [e, i, r]
        b = getattr(self, b_name).to(weight.device, compute)  # [e, r, o]
        merged = torch.baddbmm(weight.to(compute), a, b, alpha=self.scaling)  # [e, i, o]
        return merged.to(weight.dtype)

    def adapter(self, name: str, weights: Mapping[str, Tensor | Stored]) -> Adapter | None:
        """Return the adapter of the matrix called ``name``, out of the parameters ``weights``."""
        if self.disabled:
            return None
        a_name, b_name = _adapter_names(name)
        return Adapter(a_name, b_name, weights[a_name], weights[b_name], self.scaling)

    def draw_dropout_mask(self, x: Tensor) -> Tensor | None:
        """Return the factors of an adapter's input ``x``, None without dropout."""
        if not self.draws_random_numbers():
            return None
        return self.dropout(torch.ones_like(x))

    def draws_random_numbers(self) -> bool:
        """Return whether there is dropout."""
        return self.training and self.dropout.p > 0.0 and not self.disabled

    def extra_repr(self) -> str:
        """Return sizes, rank and alpha for ``repr``."""
        return f"{super().extra_repr()}, rank={self.rank}, alpha={self.alpha}"


def _adapter_names(matrix: str) -> tuple[str, str]:
    """Return the names of the parameters A and B of a matrix's adapter."""
    part = matrix.removesuffix("_proj")
    return f"lora_{part}_a", f"lora_{part}_b"


@cache
def _adapt_stored_class(adapted: type[LoRAGroupedExperts], stored: type[GroupedExperts]) -> type[LoRAGroupedExperts]:
    """Class of adapted experts that store their weights like ``stored``."""
    members = {"stored_weight": stored.stored_weight, "stored_kind": stored}
    return type(f"{adapted.__name__}{stored.__name__}", (adapted, stored), members)
