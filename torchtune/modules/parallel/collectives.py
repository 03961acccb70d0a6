"""Differentiable collectives on activations.

Shards are equal parts of dimension 1, the sequence; batches are padded to a multiple of the group's size.
"""

from collections.abc import Callable
from functools import partial
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


Collective = Callable[[Tensor], Tensor]


def _all_gather_sequence(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather shards ``[b, s, ...]`` to ``[b, s * ranks, ...]``."""
    # The collective joins tensors along their first dimension: positions come before rows, [s, b, ...].
    rows = part.transpose(0, 1).contiguous()
    if len(part) == 1:  # without a view of the result: FSDP does not support views here
        sequence = part.new_empty(1, part.shape[1] * group.size(), *part.shape[2:])
        _all_gather(sequence.transpose(0, 1), rows, group=group)
        return sequence
    sequence = rows.new_empty(rows.shape[0] * group.size(), *rows.shape[1:])  # [s * ranks, b, ...]
    _all_gather(sequence, rows, group=group)
    return sequence.transpose(0, 1).contiguous()


def _reduce_scatter_sequence(summand: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Reduce-scatter ``[b, s, ...]`` to ``[b, s / ranks, ...]``."""
    rows = summand.transpose(0, 1).contiguous()
    part = rows.new_empty(rows.shape[0] // group.size(), *rows.shape[1:])
    _reduce_scatter(part, rows, group=group)
    return part.transpose(0, 1)


class _Collective(torch.autograd.Function):
    """A collective and the one of its backward pass."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, run: Collective, run_backward: Collective) -> Tensor:
        ctx.run_backward = run_backward
        return run(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.run_backward(grad), None, None


def _all_reduce(summand: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = summand.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


def _sequence_to_heads(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    # [b, s, ranks * n, h] -> [ranks, s, b, n, h] -> [b, ranks * s, n, h]
    sent = value.unflatten(2, (group.size(), -1)).permute(2, 1, 0, 3, 4).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.flatten(0, 1).transpose(0, 1)


def _heads_to_sequence(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    # [b, ranks * s, n, h] -> [ranks, s, b, n, h] -> [b, s, ranks * n, h]
    sent = value.transpose(0, 1).unflatten(0, (group.size(), -1)).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.permute(2, 1, 0, 3, 4).flatten(2, 3)


@outside_graphs
def gather_sequence(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather ``[b, s / ranks, ...]`` to ``[b, s, ...]``; the backward pass is a reduce-scatter."""
    return _Collective.apply(
        part, partial(_all_gather_sequence, group=group), partial(_reduce_scatter_sequence, group=group)
    )


@outside_graphs
def sum_and_split_sequence(summand: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Reduce-scatter ``[b, s, ...]`` to ``[b, s / ranks, ...]``; the backward pass is an all-gather."""
    return _Collective.apply(
        summand, partial(_reduce_scatter_sequence, group=group), partial(_all_gather_sequence, group=group)
    )


@outside_graphs
def gather_vocabulary(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather logits ``[..., v / ranks]`` to ``[..., v]``.

    All ranks compute the same loss, so the backward pass only takes this rank's slice of the gradient.
    """
    width = part.shape[-1]

    def gather(part: Tensor) -> Tensor:
        return _all_gather_sequence(part.movedim(-1, 0).unsqueeze(0), group).squeeze(0).movedim(0, -1)

    return _Collective.apply(part, gather, lambda grad: grad.narrow(-1, group.rank() * width, width))


def vocabulary_parallel_linear(x: Tensor, weight: "DTensor") -> Tensor:
    """Compute all-gathered logits ``[..., v]`` of replicated ``[..., d]``; the gradient of ``x`` is a partial sum."""
    if weight.device_mesh.mesh_dim_names != ("tp",):
        raise RuntimeError("The output projection is sharded by FSDP: call it after the forward pass of its model.")
    return gather_vocabulary(F.linear(x, weight.to_local()), weight.device_mesh.get_group())


@outside_graphs
def sum_gradients(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return a replicated value unchanged; the backward pass is an all-reduce."""
    return _Collective.apply(value, lambda value: value.view_as(value), partial(_all_reduce, group=group))


@outside_graphs
def sum_over_ranks(summand: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-reduce; the backward pass is also an all-reduce, because ranks use the sum differently."""
    return _Collective.apply(summand, partial(_all_reduce, group=group), partial(_all_reduce, group=group))


@outside_graphs
def sum_of_equals(summand: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-reduce; all ranks compute the same of the sum, so the gradient is passed on."""
    return _Collective.apply(summand, partial(_all_reduce, group=group), lambda grad: grad)


@outside_graphs
def exchange_sequence_for_heads(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-to-all from sequence shards ``[b, s, n, h]`` to head shards ``[b, s * ranks, n / ranks, h]``."""
    return _Collective.apply(value, partial(_sequence_to_heads, group=group), partial(_heads_to_sequence, group=group))


@outside_graphs
def exchange_heads_for_sequence(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-to-all from head shards ``[b, s * ranks, n / ranks, h]`` to sequence shards ``[b, s, n, h]``."""
    return _Collective.apply(value, partial(_heads_to_sequence, group=group), partial(_sequence_to_heads, group=group))


@outside_graphs
def exchange_rows(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """All-to-all of ``sent`` and ``received`` rows per rank; the backward pass sends their gradients back."""

    def exchange(rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
        return out

    send = partial(exchange, sent=sent, received=received)
    send_back = partial(exchange, sent=received, received=sent)
    return _Collective.apply(rows, send, send_back)
