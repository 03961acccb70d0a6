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
        num_kv_heads = k.shape[2]
        if num_kv_heads < ranks:
            k = k.repeat_interleave(ranks // num_kv_heads, dim=2)
            v = v.repeat_interleave(ranks // num_kv_heads, dim=2)
        # Queries, keys and values of each rank's heads side by side, so that one all-to-all suffices.
        by_rank = [heads.unflatten(2, (ranks, -1)) for heads in (q, k, v)]  # [b, s / ranks, ranks, heads / ranks, h]
        sizes = [heads.shape[3] for heads in by_rank]
        shards = torch.cat(by_rank, dim=3).flatten(2, 3)
        own_heads = exchange_sequence_for_heads(shards, self.group)  # [b, s, (n + 2 n_kv) / ranks, h]
        if sinks is not None:
            options["sinks"] = sinks.chunk(ranks)[self.group.rank()]
        q, k, v = own_heads.split(sizes, dim=2)
        out = attention(q, k, v, **options)
        return exchange_heads_for_sequence(out, self.group)
