"""Expert parallelism: all-to-all dispatch of rows to the ranks of their experts, and back."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from torchtune.modules._outside_graphs import outside_graphs
from torchtune.modules.moe.experts import GroupedExperts
from torchtune.modules.moe.moe import invert_permutation, permute_rows
from torchtune.modules.parallel.collectives import exchange_rows
from torchtune.modules.parallel.tensor_parallel import ParallelError, place_parameters


def exchange_sizes(sent_counts: Tensor, received_counts: Tensor, rows: int) -> tuple[list[int], list[int]]:
    """Return the numbers of rows that this rank sends to and receives from every rank. Syncs host and device.

    Args:
        sent_counts: numbers of this rank's rows by target rank and expert, int64 ``[ranks, e / ranks]``.
        received_counts: numbers of received rows by source rank and local expert, int64 ``[ranks, e / ranks]``.
        rows: number of this rank's rows.
    """
    rows_per_rank = torch.stack([sent_counts.sum(1), received_counts.sum(1)])  # [2, ranks]
    sent, received = rows_per_rank.tolist()  # in one copy, because the host waits for every copy
    return sent, received


class ExpertParallel:
    """Expert-parallel call of experts, between two all-to-alls of rows.

    No row is dropped, at any load of a rank. Expert i is on rank ``i // (e / ranks)``.

    Args:
        group: process group of expert parallelism.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    @outside_graphs  # the number of received rows changes with every call
    def __call__(self, experts: nn.Module, rows: Tensor, counts: Tensor) -> Tensor:
        """Apply the experts of all ranks to this rank's rows ``[t, d]``.

        Args:
            experts: this rank's experts.
            rows: rows ``[t, d]``, sorted by expert.
            counts: number of this rank's rows per expert, of all e experts, int64 ``[e]``.

        Returns:
            The outputs of this rank's rows, ``[t, d]``, in their order.
        """
        num_ranks = self.group.size()
        received_counts = torch.empty_like(counts)
        dist.all_to_all_single(received_counts, counts, group=self.group)
        received_counts = received_counts.view(num_ranks, -1)  # by source rank and local expert
        # The host must know the sizes, because it allocates the received rows.
        sent, received = exchange_sizes(counts.view(num_ranks, -1), received_counts, len(rows))
        received_rows = exchange_rows(rows, sent, received, self.group)

        # Received rows are sorted by source rank, then by expert: sort them by expert, and back afterward.
        local_experts = torch.arange(received_counts.shape[1], device=rows.device).repeat(num_ranks)
        # With output_size, the host does not wait for the sum of the counts.
        expert_of_row = local_experts.repeat_interleave(received_counts.flatten(), output_size=len(received_rows))
        order = expert_of_row.argsort(stable=True)
        inverse = invert_permutation(order)
        received_rows = permute_rows(received_rows, order, inverse)  # by expert
        computed = experts(received_rows, received_counts.sum(0))
        computed = permute_rows(computed, inverse, order)  # by source rank again
        return exchange_rows(computed, received, sent, self.group)  # [t, d]


def check_experts(path: str, experts: nn.Module, num_ranks: int) -> None:
    """Check that ``num_ranks`` ranks can share the experts equally.

    Raises:
        ParallelError: the module is not a :class:`GroupedExperts`, or ``num_ranks`` does not divide the number of
            experts.
    """
    if not isinstance(experts, GroupedExperts):
        raise ParallelError(
            f"expert_parallel_dim is {num_ranks}: '{path}' is a {type(experts).__name__}, which cannot be distributed "
            "over ranks: set it to 1."
        )
    if experts.num_experts % num_ranks:
        raise ParallelError(
            f"expert_parallel_dim is {num_ranks}: it must divide the {experts.num_experts} experts of '{path}', so "
            "that all ranks have equally many."
        )


def place_experts(experts: GroupedExperts, mesh: DeviceMesh) -> None:
    """Shard all parameters of experts, including adapters and quantized weights, by expert over ``mesh``."""
    place_parameters(experts, mesh, {name: Shard(0) for name, _ in experts.named_parameters()})
