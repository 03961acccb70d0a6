"""Collectives on activations, with their gradients: each is the other's transpose.

All of them split or join dimension 1, the sequence, in equal parts; whoever makes the batches pads it to a multiple.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtune.modules._outside_graphs import outside_graphs

# torch 2.13 gave them new names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _joined(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The parts ``[b, s, ...]`` of all ranks one after another: ``[b, s * ranks, ...]``."""
    rows = part.transpose(0, 1).contiguous()
    if len(part) == 1:  # written in its final shape: FSDP wants no views
        joined = part.new_empty(1, part.shape[1] * group.size(), *part.shape[2:])
        _all_gather(joined.transpose(0, 1), rows, group=group)
        return joined
    whole = rows.new_empty(rows.shape[0] * group.size(), *rows.shape[1:])
    _all_gather(whole, rows, group=group)
    return whole.transpose(0, 1).contiguous()


def _summed_part(summand: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part ``[b, s / ranks, ...]`` of the sum over ranks of ``[b, s, ...]``."""
    rows = summand.transpose(0, 1).contiguous()
    part = rows.new_empty(rows.shape[0] // group.size(), *rows.shape[1:])
    _reduce_scatter(part, rows, group=group)
    return part.transpose(0, 1)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _joined(part, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed_part(grad, ctx.group), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, summand: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _summed_part(summand, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _joined(grad, ctx.group), None


class _GatherVocabulary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.width = group, part.shape[-1]
        return _joined(part.movedim(-1, 0).unsqueeze(0), group).squeeze(0).movedim(0, -1)

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
        return _summed(grad, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, summand: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _summed(summand, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.group), None


def _summed(summand: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = summand.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup, to_heads: bool) -> Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        return _exchanged(value, group, to_heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _exchanged(grad, ctx.group, not ctx.to_heads), None, None


def _exchanged(value: Tensor, group: dist.ProcessGroup, to_heads: bool) -> Tensor:
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
    """Join the parts ``[b, s / ranks, ...]`` of a sequence; gradients are summed over the ranks and split again."""
    return _Gather.apply(part, group)


@outside_graphs
def sum_and_split_sequence(summand: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum ``[b, s, ...]`` over the ranks; each keeps its part ``[b, s / ranks, ...]``."""
    return _ReduceScatter.apply(summand, group)


@outside_graphs
def gather_vocabulary(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather logits ``[..., v / ranks]`` to ``[..., v]``; each rank computes the same with them, so that the
    gradient of its own shard is there already."""
    return _GatherVocabulary.apply(part, group)


@outside_graphs
def sum_gradients(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``value`` as it is, the same on all ranks; its gradient is the sum of what they find."""
    return _SumGradients.apply(value, group)


@outside_graphs
def sum_over_ranks(summand: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the ranks, which each goes on with in its own way: gradients are summed too."""
    return _Sum.apply(summand, group)


@outside_graphs
def exchange_sequence_for_heads(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All heads of a part ``[b, s, n, h]`` against some heads of the whole ``[b, s * ranks, n / ranks, h]``."""
    return _Exchange.apply(value, group, True)


@outside_graphs
def exchange_heads_for_sequence(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The inverse: ``[b, s * ranks, n / ranks, h]`` to ``[b, s, n, h]``."""
    return _Exchange.apply(value, group, False)
