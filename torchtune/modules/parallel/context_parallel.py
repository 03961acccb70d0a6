"""Attention with context parallelism."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtune.modules.kernels.attention import attention
from torchtune.modules.parallel.collectives import exchange_heads_for_sequence, exchange_sequence_for_heads


class ContextParallelAttention:
    """Replacement of :func:`torchtune.modules.attention` for sequences that are sharded over ranks.

    An all-to-all gives each rank some heads of the full sequence, on which single-device kernels run (Jacobs
    et al., "DeepSpeed Ulysses", arXiv:2309.14509). Document boundaries are unchanged, there is no mask, and all ranks
    have the same load for any document lengths.

    With fewer key heads than ranks, key heads are repeated; the gradients of the copies are summed.

    Args:
        group: process group of context parallelism.
    """

    shares_prefixes = True

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None, **options: Any) -> Tensor:
        """Compute attention for this rank's shard of the sequence.

        Args:
            q: queries ``[b, s / ranks, n, h]``; n is a multiple of the number of ranks.
            k: keys ``[b, s / ranks, n_kv, h]``; n_kv is a multiple or a divisor of the number of ranks.
            v: values ``[b, s / ranks, n_kv, h]``.
            sinks: attention sinks of all n heads; each rank uses its shard.
            options: arguments of :func:`torchtune.modules.attention`; ``documents`` describe the full sequence.

        Returns:
            Tensor ``[b, s / ranks, n, h]``.
        """
        ranks = self.group.size()
        if k.shape[2] < ranks:
            k, v = (t.repeat_interleave(ranks // t.shape[2], dim=2) for t in (k, v))
        sizes = [t.shape[2] // ranks for t in (q, k, v)]
        # Concatenated per rank, so that one all-to-all suffices.
        parts = [t.unflatten(2, (ranks, -1)) for t in (q, k, v)]
        whole = exchange_sequence_for_heads(torch.cat(parts, dim=3).flatten(2, 3), self.group)
        if sinks is not None:
            options["sinks"] = sinks.chunk(ranks)[self.group.rank()]
        out = attention(*whole.split(sizes, dim=2), **options)
        return exchange_heads_for_sequence(out, self.group)
