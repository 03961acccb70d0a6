"""Differentiable collectives on activations.

Shards are equal parts of dimension 1, the sequence; batches are padded to a multiple of the group's size.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtune.modules._outside_graphs import outside_graphs

# Renamed in torch 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _all_gather_sequence(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather shards ``[b, s, ...]`` to ``[b, s * ranks, ...]``."""
    rows = part.transpose(0, 1).contiguous()
    if len(part) == 1:  # without a view: FSDP does not support views here
        joined = part.new_empty(1, part.shape[1] * group.size(), *part.shape[2:])
        _all_gather(joined.transpose(0, 1), rows, group=group)
        return joined
    whole = rows.new_empty(rows.shape[0] * group.size(), *rows.shape[1:])
    _all_gather(whole, rows, group=group)
    return whole.transpose(0, 1).contiguous()


def _reduce_scatter_sequence(summand: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Reduce-scatter ``[b, s, ...]`` to ``[b, s / ranks, ...]``."""
    rows = summand.transpose(0, 1).contiguous()
    part = rows.new_empty(rows.shape[0] // group.size(), *rows.shape[1:])
    _reduce_scatter(part, rows, group=group)
    return part.transpose(0, 1)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather_sequence(part, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter_sequence(grad, ctx.group), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, summand: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _reduce_scatter_sequence(summand, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_gather_sequence(grad, ctx.group), None


class _GatherVocabulary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.width = group, part.shape[-1]
        return _all_gather_sequence(part.movedim(-1, 0).unsqueeze(0), group).squeeze(0).movedim(0, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.narrow(-1, ctx.group.rank() * ctx.width, ctx.width), None


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grad, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, summand: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_reduce(summand, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grad, ctx.group), None


def _all_reduce(summand: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = summand.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup, to_heads: bool) -> Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        return _all_to_all(value, group, to_heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _all_to_all(grad, ctx.group, not ctx.to_heads), None, None


def _all_to_all(value: Tensor, group: dist.ProcessGroup, to_heads: bool) -> Tensor:
    ranks = group.size()
    if to_heads:  # [b, s, ranks * n, h] -> [ranks, s, b, n, h] -> [b, ranks * s, n, h]
        sent = value.unflatten(2, (ranks, -1)).permute(2, 1, 0, 3, 4).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received.flatten(0, 1).transpose(0, 1)
    # [b, ranks * s, n, h] -> [ranks, s, b, n, h] -> [b, s, ranks * n, h]
    sent = value.transpose(0, 1).unflatten(0, (ranks, -1)).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.permute(2, 1, 0, 3, 4).flatten(2, 3)


@outside_graphs
def gather_sequence(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather ``[b, s / ranks, ...]`` to ``[b, s, ...]``; the backward pass is a reduce-scatter."""
    return _Gather.apply(part, group)


@outside_graphs
def sum_and_split_sequence(summand: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Reduce-scatter ``[b, s, ...]`` to ``[b, s / ranks, ...]``; the backward pass is an all-gather."""
    return _ReduceScatter.apply(summand, group)


@outside_graphs
def gather_vocabulary(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather logits ``[..., v / ranks]`` to ``[..., v]``.

    All ranks compute the same loss, so the backward pass only takes this rank's slice of the gradient.
    """
    return _GatherVocabulary.apply(part, group)


@outside_graphs
def sum_gradients(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return a replicated value unchanged; the backward pass is an all-reduce."""
    return _SumGradients.apply(value, group)


@outside_graphs
def sum_over_ranks(summand: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-reduce; the backward pass is also an all-reduce, because ranks use the sum differently."""
    return _Sum.apply(summand, group)


@outside_graphs
def exchange_sequence_for_heads(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-to-all from sequence shards ``[b, s, n, h]`` to head shards ``[b, s * ranks, n / ranks, h]``."""
    return _AllToAll.apply(value, group, True)


@outside_graphs
def exchange_heads_for_sequence(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-to-all from head shards ``[b, s * ranks, n / ranks, h]`` to sequence shards ``[b, s, n, h]``."""
    return _AllToAll.apply(value, group, False)
