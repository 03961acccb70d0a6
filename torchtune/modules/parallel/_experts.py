"""Experts on several ranks: every row is computed on the rank of its expert, and returns to its own rank."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from torchtune.modules._outside_graphs import outside_graphs
from torchtune.modules.moe.experts import GroupedExperts
from torchtune.modules.moe.moe import permute_rows
from torchtune.modules.parallel._styles import ParallelError, place_parameters


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out


def exchanged_sizes(own: Tensor, theirs: Tensor, rows: int) -> tuple[list[int], list[int]]:
    """How many rows this rank sends to every rank, and receives from it. The host waits for the device.

    Args:
        own: rows of this rank by rank and expert there, int64 ``[ranks, e / ranks]``.
        theirs: rows that every rank sends, by expert here, int64 ``[ranks, e / ranks]``.
        rows: of this rank.
    """
    sent, received = torch.stack([own.sum(1), theirs.sum(1)]).tolist()
    return sent, received


class ExpertParallel:
    """Calls experts that are distributed over ranks: an all-to-all of rows before them, and one after them.

    No row is dropped, whatever the load of a rank is. Expert i is on rank ``i // (e / ranks)``.

    Args:
        group: process group of expert parallelism.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    @outside_graphs  # what a rank receives has another size each time
    def __call__(self, experts: nn.Module, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows ``[t, d]`` of this rank, sorted by expert, to ``[t, d]``.

        Args:
            experts: those of this rank.
            rows: sorted by expert.
            counts: rows of every expert of all ranks, int64 ``[e]``.
        """
        ranks = self.group.size()
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        theirs = theirs.view(ranks, -1)
        sent, received = exchanged_sizes(counts.view(ranks, -1), theirs, len(rows))
        arrived = _AllToAll.apply(rows, sent, received, self.group)
        # They come by rank, and of every rank by expert.
        own = torch.arange(theirs.shape[1], device=rows.device).repeat(ranks)
        order = own.repeat_interleave(theirs.flatten(), output_size=len(arrived)).argsort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        computed = experts(permute_rows(arrived, order, inverse), theirs.sum(0))
        return _AllToAll.apply(permute_rows(computed, inverse, order), received, sent, self.group)


def check_experts(path: str, experts: nn.Module, ranks: int) -> None:
    """Check that every one of ``ranks`` gets as many experts.

    Raises:
        ParallelError: they are no stack of experts, or of a number that the ranks do not divide.
    """
    if not isinstance(experts, GroupedExperts):
        raise ParallelError(
            f"expert_parallel_dim is {ranks}: '{path}' is a {type(experts).__name__}, of which nothing says how it is "
            "distributed: set it to 1."
        )
    if experts.num_experts % ranks:
        raise ParallelError(
            f"expert_parallel_dim is {ranks}: it must divide the {experts.num_experts} experts of '{path}', so that "
            "every rank has as many."
        )


def place_experts(experts: GroupedExperts, mesh: DeviceMesh) -> None:
    """Shard all parameters of experts, with those of adapters and of quantised weights, by expert over ``mesh``."""
    place_parameters(experts, mesh, {name: Shard(0) for name, _ in experts.named_parameters()})
