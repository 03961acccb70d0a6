"""Grouped matrix products of rows that are sorted by matrix; matrices without rows are not read."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from torchtune.modules._outside_graphs import outside_graphs
from torchtune.modules.kernels.onednn import mm, uses_onednn
from torchtune.modules.kernels.optional import card_of
from torchtune.modules.low_precision.formats import Stored

_TORCH_LOOP_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _groups(counts: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield (index of the matrix, slice of its rows); the host waits for the counts."""
    start = 0
    for index, size in enumerate(counts.tolist()):
        end = start + size
        yield index, slice(start, end)
        start = end


def _loops_in_torch(x: Tensor, columns: int, num_groups: int) -> bool:
    """Return whether torch's loop over the groups on a CPU is faster than ours, as for the products of adapters.

    Torch's takes a microsecond a group and multiplies as ``torch.mm`` does; ours is slower, and may use oneDNN.

    Args:
        x: rows of one factor, ``[t, i]``.
        columns: number o of columns of the other.
        num_groups: number of groups.
    """
    has_loop = x.device.type == "cpu" and hasattr(F, "grouped_mm") and x.dtype in _TORCH_LOOP_DTYPES
    if not has_loop:
        return False
    # Torch wants rows that begin at multiples of 16 bytes.
    bytes_of_row = x.shape[1] * x.itemsize
    bytes_of_output_row = columns * x.itemsize
    if bytes_of_row % 16 or bytes_of_output_row % 16 or not x.is_contiguous():
        return False
    multiplications_per_group = x.numel() * columns // num_groups
    return not uses_onednn(x.dtype, multiplications_per_group)


@torch.library.custom_op("torchtune::grouped_rows", mutates_args=())
def _multiply_rows(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Rows ``[t, i]`` times the matrix of their group ``[e, i, o]``: ``[t, o]``."""
    columns = weight.shape[2]
    if _loops_in_torch(x, columns, len(counts)):
        ends = counts.cumsum(0, dtype=torch.int32)
        return F.grouped_mm(x, weight, offs=ends)
    out = x.new_empty(x.shape[0], columns)
    for index, rows in _groups(counts):
        if rows.stop > rows.start:
            mm(x[rows], weight[index], out=out[rows])
    return out


@torch.library.custom_op("torchtune::grouped_weights", mutates_args=())
def _weight_gradient(x: Tensor, grad: Tensor, counts: Tensor) -> Tensor:
    """``xᵀ grad`` of each group, from rows ``[t, i]`` and ``[t, o]``: ``[e, i, o]``."""
    columns = grad.shape[1]
    if _loops_in_torch(x, columns, len(counts)):
        ends = counts.cumsum(0, dtype=torch.int32)
        return F.grouped_mm(x.t(), grad, offs=ends)
    out = x.new_empty(counts.shape[0], x.shape[1], columns)
    for index, rows in _groups(counts):
        if rows.stop > rows.start:
            mm(x[rows].t(), grad[rows], out=out[index])
        else:  # no product would write to this matrix
            out[index].zero_()
    return out


# The compiler asks for shapes: the number of rows does not depend on the counts, which it does not know.
@_multiply_rows.register_fake
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
    grad_x = None
    if needs_x:
        grad_x = _multiply_rows(grad, weight.transpose(1, 2), counts)
    grad_weight = None
    if needs_weight:
        grad_weight = _weight_gradient(x, grad, counts)
    return grad_x, grad_weight, None


_multiply_rows.register_autograd(_backward, setup_context=_setup_context)


def has_grouped_kernel(x: Tensor, weight: Tensor) -> bool:
    """Return whether torch's grouped kernel supports these tensors.

    The kernel needs bfloat16 on CUDA, a card for which torch has it (:func:`torchtune.modules.kernels.card_of`), and
    rows aligned to 16 bytes.
    """
    if not _are_aligned_bfloat16(x, weight) or not hasattr(F, "grouped_mm"):
        return False
    card = card_of(x.device)
    return card is None or card.has_grouped_products


def _are_aligned_bfloat16(x: Tensor, weight: Tensor) -> bool:
    """Whether rows ``[t, i]`` and matrices ``[e, i, o]`` are bfloat16 on CUDA, with rows of 16 bytes or a multiple."""
    is_half = x.dtype == weight.dtype == torch.bfloat16
    is_aligned = x.shape[1] % 8 == 0 and weight.shape[2] % 8 == 0  # 8 numbers of 2 bytes
    return x.is_cuda and is_half and is_aligned


@outside_graphs
def _other_grouped_mm(kernel: Callable[..., Tensor], x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Compute :func:`grouped_mm` by ``gmm`` of grouped-gemm."""
    return kernel(x.contiguous(), weight.contiguous(), counts)


def local_experts(weight: Tensor) -> Tensor:
    """Return this rank's shard of ``weight`` if it is sharded (a ``DTensor``), otherwise ``weight``."""
    if hasattr(weight, "to_local"):
        return weight.to_local()
    return weight


class RowGroups:
    """Rows that are sorted by matrix, for all products of a layer.

    Attributes:
        counts: int64 ``[e]``, number of rows for each matrix.
        ends: int32 ``[e]``, where each matrix's rows end.
    """

    def __init__(self, counts: Tensor, ends: Tensor) -> None:
        self.counts = counts
        self.ends = ends
        self._group_of_row: Tensor | None = None

    @classmethod
    def of(cls, counts: Tensor) -> "RowGroups":
        """Make the groups of ``counts``, int64 ``[e]``."""
        return cls(counts, counts.cumsum(0, dtype=torch.int32))

    def group_of_row(self, rows: int) -> Tensor:
        """Return the group of each of the ``rows`` rows, int64 ``[t]``; it is computed once."""
        if self._group_of_row is None:
            # With output_size, the host does not wait for the sum of the counts.
            self._group_of_row = torch.repeat_interleave(self.counts, output_size=rows)
        return self._group_of_row


class _RepeatByGroup(torch.autograd.Function):
    """A row of each group, for all rows of the group; gradients are summed in float32."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group_of_row: Tensor) -> Tensor:
        ctx.save_for_backward(group_of_row)
        ctx.num_groups = len(values)
        return values.index_select(0, group_of_row)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (group_of_row,) = ctx.saved_tensors
        return _sum_rows(grad, group_of_row, ctx.num_groups), None


def _sum_rows(rows: Tensor, group_of_row: Tensor, num_groups: int) -> Tensor:
    """Sum rows ``[t, o]`` by group to ``[e, o]``."""
    # Sums of many rows lose digits in half precision.
    compute_dtype = torch.promote_types(rows.dtype, torch.float32)
    sums = rows.new_zeros(num_groups, rows.shape[1], dtype=compute_dtype)
    sums.index_add_(0, group_of_row, rows.to(compute_dtype))
    return sums.to(rows.dtype)


def sum_by_group(x: Tensor, groups: RowGroups) -> Tensor:
    """Sum the rows of each group, in at least float32: ``[t, o]`` to ``[e, o]``."""
    return _sum_rows(x, groups.group_of_row(len(x)), len(groups.counts))


def repeat_by_group(values: Tensor, groups: RowGroups, rows: int) -> Tensor:
    """Repeat ``values[0]`` for the rows of the first group, ``values[1]`` for those of the second, and so on.

    Args:
        values: ``[e, o]``; their gradients are summed in at least float32.
        groups: the rows of each group.
        rows: number t of all rows.

    Returns:
        Tensor ``[t, o]``.
    """
    return _RepeatByGroup.apply(values, groups.group_of_row(rows))


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
    uses_torch_kernel = kernel
    if kernel is None:
        uses_torch_kernel = has_grouped_kernel(x, weight)
    if uses_torch_kernel:
        return F.grouped_mm(x, weight, offs=groups.ends)
    if kernel is None and _are_aligned_bfloat16(x, weight):
        card = card_of(x.device)
        if card is not None and card.other_grouped_products is not None:
            return _other_grouped_mm(card.other_grouped_products, x, weight, groups.counts)
    return _multiply_rows(x, weight, groups.counts)


def grouped_outer(x: Tensor, grad: Tensor, groups: RowGroups) -> Tensor:
    """Compute ``xᵀ grad`` of the rows of each group, the gradient of the matrices of :func:`grouped_mm`.

    Args:
        x: ``[t, i]``, sorted by group.
        grad: ``[t, o]``.
        groups: the rows of each group.

    Returns:
        Tensor ``[e, i, o]``, zero for groups without rows.
    """
    # The second factor as matrices of one group, [1, t, o], whose columns are checked.
    if has_grouped_kernel(x, grad.unsqueeze(0)):
        return F.grouped_mm(x.t(), grad, offs=groups.ends)
    if _are_aligned_bfloat16(x, grad.unsqueeze(0)):
        card = card_of(x.device)
        if card is not None and card.other_grouped_products is not None:
            return card.other_grouped_products(x.contiguous(), grad.contiguous(), groups.counts, trans_a=True)
    return _weight_gradient(x, grad, groups.counts)


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
        transposed_weight = ctx.decode(*stored).transpose(1, 2)  # [e, o, i]
        grad_x = grouped_mm(grad.contiguous(), transposed_weight, RowGroups(counts, ends))
        # counts, ends, decode and the stored tensors have no gradient.
        return grad_x, None, None, None, *[None] * len(stored)


def frozen_grouped_mm(x: Tensor, weight: Stored, groups: RowGroups) -> Tensor:
    """Compute :func:`grouped_mm` with a frozen weight; only its stored tensors are saved for the backward pass."""
    stored = [local_experts(tensor) for tensor in weight.tensors]
    return _FrozenGroupedMM.apply(x, groups.counts, groups.ends, weight.decode, *stored)
