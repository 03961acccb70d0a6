"""Grouped matrix products of rows that are sorted by matrix; matrices without rows are not read."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from torchtune.modules._outside_graphs import outside_graphs
from torchtune.modules.kernels.optional import card_of
from torchtune.modules.low_precision.formats import Stored


def _groups(counts: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield (index of the matrix, slice of its rows)."""
    start = 0
    for index, size in enumerate(counts.tolist()):
        yield index, slice(start, start + size)
        start += size


@torch.library.custom_op("torchtune::grouped_rows", mutates_args=())
def _forward(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0], weight.shape[2])
    for index, rows in _groups(counts):
        if rows.stop > rows.start:
            torch.mm(x[rows], weight[index], out=out[rows])
    return out


@torch.library.custom_op("torchtune::grouped_weights", mutates_args=())
def _weight_gradient(x: Tensor, grad: Tensor, counts: Tensor) -> Tensor:
    out = x.new_empty(counts.shape[0], x.shape[1], grad.shape[1])
    for index, rows in _groups(counts):
        if rows.stop > rows.start:
            torch.mm(x[rows].t(), grad[rows], out=out[index])
        else:
            out[index].zero_()
    return out


@_forward.register_fake
def _(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@_weight_gradient.register_fake
def _(x: Tensor, grad: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(counts.shape[0], x.shape[1], grad.shape[1])


def _setup_context(ctx, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, counts = ctx.saved_tensors
    needs_x, needs_weight, _ = ctx.needs_input_grad
    grad_x = _forward(grad, weight.transpose(1, 2), counts) if needs_x else None
    grad_weight = _weight_gradient(x, grad, counts) if needs_weight else None
    return grad_x, grad_weight, None


_forward.register_autograd(_backward, setup_context=_setup_context)


def has_grouped_kernel(x: Tensor, weight: Tensor) -> bool:
    """Return whether torch's grouped kernel supports these tensors.

    The kernel needs bfloat16 on CUDA, a card for which torch has it (:func:`torchtune.modules.kernels.card_of`), and
    rows aligned to 16 bytes.
    """
    if not _are_aligned_halves(x, weight) or not hasattr(F, "grouped_mm"):
        return False
    card = card_of(x.device)
    return card is None or card.has_grouped_products


def _are_aligned_halves(x: Tensor, weight: Tensor) -> bool:
    is_half = x.dtype == weight.dtype == torch.bfloat16
    return x.is_cuda and is_half and weight.shape[1] % 8 == 0 and weight.shape[2] % 8 == 0


@outside_graphs
def _other_grouped_mm(kernel: Callable[..., Tensor], x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Compute :func:`grouped_mm` by ``gmm`` of grouped-gemm."""
    return kernel(x.contiguous(), weight.contiguous(), counts)


def local_experts(weight: Tensor) -> Tensor:
    """Return this rank's shard of ``weight`` if it is sharded (a ``DTensor``), otherwise ``weight``."""
    return weight.to_local() if hasattr(weight, "to_local") else weight


class RowGroups(NamedTuple):
    """Rows that are sorted by matrix, for all products of a layer.

    Attributes:
        counts: int64 ``[e]``, number of rows for each matrix.
        ends: int32 ``[e]``, where each matrix's rows end.
    """

    counts: Tensor
    ends: Tensor

    @classmethod
    def of(cls, counts: Tensor) -> "RowGroups":
        """Make the groups of ``counts``, int64 ``[e]``."""
        return cls(counts, counts.cumsum(0, dtype=torch.int32))


def grouped_mm(x: Tensor, weight: Tensor, groups: RowGroups, *, kernel: bool | None = None) -> Tensor:
    """Multiply the rows of the first group by ``weight[0]``, those of the second group by ``weight[1]``, and so on.

    Args:
        x: rows ``[t, i]``, sorted by matrix.
        weight: ``[e, i, o]``; matrices without rows are not computed and get a zero gradient.
        groups: the rows of each matrix, t in total.
        kernel: use torch's grouped kernel (True) or a loop over the matrices with rows (False); by default torch's
            kernel is used where it has one, or else that of grouped-gemm, or else the loop.

    Returns:
        Tensor ``[t, o]``.
    """
    weight = local_experts(weight)
    uses_torch_kernel = has_grouped_kernel(x, weight) if kernel is None else kernel
    if uses_torch_kernel:
        return F.grouped_mm(x, weight, offs=groups.ends)
    if kernel is None and _are_aligned_halves(x, weight):
        card = card_of(x.device)
        if card is not None and card.other_grouped_products is not None:
            return _other_grouped_mm(card.other_grouped_products, x, weight, groups.counts)
    return _forward(x, weight, groups.counts)


class _FrozenGroupedMM(torch.autograd.Function):
    """Grouped product with frozen matrices, which are dequantized in the forward pass and in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, counts: Tensor, ends: Tensor, decode: Callable[..., Tensor], *stored: Tensor
    ) -> Tensor:
        ctx.save_for_backward(counts, ends, *stored)
        ctx.decode = decode
        return grouped_mm(x, decode(*stored), RowGroups(counts, ends))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        counts, ends, *stored = ctx.saved_tensors
        weight = ctx.decode(*stored).transpose(1, 2)  # [e, o, i]
        grad_x = grouped_mm(grad.contiguous(), weight, RowGroups(counts, ends))
        return grad_x, None, None, None, *(None for _ in stored)


def frozen_grouped_mm(x: Tensor, weight: Stored, groups: RowGroups) -> Tensor:
    """Compute :func:`grouped_mm` with a frozen weight; only its stored tensors are saved for the backward pass."""
    return _FrozenGroupedMM.apply(x, groups.counts, groups.ends, weight.decode, *map(local_experts, weight.tensors))
