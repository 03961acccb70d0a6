"""Differentiable collectives on activations.

Shards are equal parts of dimension 1, the sequence; batches are padded to a multiple of the group's size.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from torchtune.modules._outside_graphs import outside_graphs

if TYPE_CHECKING:  # slow to import
    from torch.distributed.tensor import DTensor

# Renamed in torch 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Collective = Callable[[Tensor, dist.ProcessGroup], Tensor]


def _all_gather_sequence(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather shards ``[b, s, ...]`` to ``[b, s * ranks, ...]``."""
    # The collective joins tensors along their first dimension, so positions come before rows.
    positions_first = part.transpose(0, 1).contiguous()  # [s, b, ...]
    full_length = part.shape[1] * group.size()
    if len(part) == 1:  # without a view of the result: FSDP does not support views here
        sequence = part.new_empty(1, full_length, *part.shape[2:])
        _all_gather(sequence.transpose(0, 1), positions_first, group=group)
        return sequence
    sequence = positions_first.new_empty(full_length, *positions_first.shape[1:])  # [s * ranks, b, ...]
    _all_gather(sequence, positions_first, group=group)
    return sequence.transpose(0, 1).contiguous()  # [b, s * ranks, ...]


def _reduce_scatter_sequence(summand: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Reduce-scatter ``[b, s, ...]`` to ``[b, s / ranks, ...]``."""
    # The collective splits the first dimension.
    positions_first = summand.transpose(0, 1).contiguous()  # [s, b, ...]
    length = len(positions_first) // group.size()
    part = positions_first.new_empty(length, *positions_first.shape[1:])  # [s / ranks, b, ...]
    _reduce_scatter(part, positions_first, group=group)
    return part.transpose(0, 1)


def _all_reduce(summand: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = summand.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


def _sequence_to_heads(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange ``[b, s, ranks * n, h]`` for ``[b, ranks * s, n, h]``."""
    by_rank = value.unflatten(2, (group.size(), -1))  # [b, s, ranks, n, h]
    sent = by_rank.permute(2, 1, 0, 3, 4).contiguous()  # [ranks, s, b, n, h], the heads of a rank side by side
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.flatten(0, 1).transpose(0, 1)  # [ranks * s, b, n, h] -> [b, ranks * s, n, h]


def _heads_to_sequence(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange ``[b, ranks * s, n, h]`` for ``[b, s, ranks * n, h]``."""
    positions_first = value.transpose(0, 1)  # [ranks * s, b, n, h]
    sent = positions_first.unflatten(0, (group.size(), -1)).contiguous()  # [ranks, s, b, n, h]
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.permute(2, 1, 0, 3, 4).flatten(2, 3)  # [b, s, ranks, n, h] -> [b, s, ranks * n, h]


class _Collective(torch.autograd.Function):
    """A collective of a group, and the one of its backward pass."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, run: Collective, run_backward: Collective, group: dist.ProcessGroup) -> Tensor:
        ctx.run_backward = run_backward
        ctx.group = group
        return run(value, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.run_backward(grad, ctx.group), None, None, None


@outside_graphs
def gather_sequence(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather ``[b, s / ranks, ...]`` to ``[b, s, ...]``; the backward pass is a reduce-scatter."""
    return _Collective.apply(part, _all_gather_sequence, _reduce_scatter_sequence, group)


@outside_graphs
def sum_and_split_sequence(summand: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Reduce-scatter ``[b, s, ...]`` to ``[b, s / ranks, ...]``; the backward pass is an all-gather."""
    return _Collective.apply(summand, _reduce_scatter_sequence, _all_gather_sequence, group)


@outside_graphs
def gather_vocabulary(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather logits ``[..., v / ranks]`` to ``[..., v]``.

    All ranks compute the same loss, so the backward pass only takes this rank's slice of the gradient.
    """

    def gather(part: Tensor, group: dist.ProcessGroup) -> Tensor:
        # The vocabulary in the place of the sequence, in a batch of one: [..., v / ranks] -> [1, v / ranks, ...].
        as_sequence = part.movedim(-1, 0).unsqueeze(0)
        gathered = _all_gather_sequence(as_sequence, group)  # [1, v, ...]
        return gathered.squeeze(0).movedim(0, -1)

    width = part.shape[-1]

    def take_own_slice(grad: Tensor, group: dist.ProcessGroup) -> Tensor:
        return grad.narrow(-1, group.rank() * width, width)

    return _Collective.apply(part, gather, take_own_slice, group)


def vocabulary_parallel_linear(x: Tensor, weight: "DTensor") -> Tensor:
    """Compute all-gathered logits ``[..., v]`` of replicated ``[..., d]``; the gradient of ``x`` is a partial sum."""
    if weight.device_mesh.mesh_dim_names != ("tp",):
        raise RuntimeError("The output projection is sharded by FSDP: call it after the forward pass of its model.")
    part = F.linear(x, weight.to_local())  # [..., v / ranks]
    return gather_vocabulary(part, weight.device_mesh.get_group())


@outside_graphs
def sum_gradients(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return a replicated value unchanged; the backward pass is an all-reduce."""
    return _Collective.apply(value, lambda value, _: value.view_as(value), _all_reduce, group)


@outside_graphs
def sum_over_ranks(summand: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-reduce; the backward pass is also an all-reduce, because ranks use the sum differently."""
    return _Collective.apply(summand, _all_reduce, _all_reduce, group)


@outside_graphs
def sum_of_equals(summand: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-reduce; all ranks compute the same from the sum, so the backward pass leaves the gradient unchanged."""
    return _Collective.apply(summand, _all_reduce, lambda grad, _: grad, group)


@outside_graphs
def exchange_sequence_for_heads(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-to-all from sequence shards ``[b, s, n, h]`` to head shards ``[b, s * ranks, n / ranks, h]``."""
    return _Collective.apply(value, _sequence_to_heads, _heads_to_sequence, group)


@outside_graphs
def exchange_heads_for_sequence(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-to-all from head shards ``[b, s * ranks, n / ranks, h]`` to sequence shards ``[b, s, n, h]``."""
    return _Collective.apply(value, _heads_to_sequence, _sequence_to_heads, group)


@outside_graphs
def exchange_rows(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """All-to-all of ``sent`` and ``received`` rows per rank; the backward pass sends their gradients back.

    Args:
        rows: ``[sum(sent), ...]``, those of the first rank first.
        sent: number of rows for each rank.
        received: number of rows from each rank.
        group: the ranks.

    Returns:
        Tensor ``[sum(received), ...]``, the rows of the first rank first.
    """

    def send(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _exchange_rows(rows, sent, received, group)

    def send_back(grad: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _exchange_rows(grad, received, sent, group)

    return _Collective.apply(rows, send, send_back, group)


def _exchange_rows(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    received_rows = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(received_rows, rows.contiguous(), received, sent, group=group)
    return received_rows
