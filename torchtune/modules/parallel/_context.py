"""Attention of a sequence that is split over ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtune.modules.attention_utils import attention
from torchtune.modules.parallel._collectives import exchange_heads_for_sequence, exchange_sequence_for_heads


class ContextParallelAttention:
    """Takes the place of :func:`torchtune.modules.attention` where each rank holds a part of every sequence.

    Queries, keys and values are exchanged so that each rank attends with some of the heads over the whole sequence, by
    the kernels of a single device (Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509). Documents therefore stay
    what they are, no mask exists, and all ranks have the same work however long the documents are.

    Fewer key heads than ranks are repeated; the gradients of the copies add up.

    Args:
        group: the ranks among which sequences are split.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None, **options: Any) -> Tensor:
        """Attention of this rank's part.

        Args:
            q: queries ``[b, s / ranks, n, h]``; n is a multiple of the ranks.
            k: keys ``[b, s / ranks, n_kv, h]``; n_kv is a multiple of the ranks, or a divisor.
            v: values, likewise.
            sinks: scores of all n heads, of which this rank takes its own.
            options: for :func:`torchtune.modules.attention`; ``documents`` are those of the whole sequence.

        Returns:
            Tensor ``[b, s / ranks, n, h]``.
        """
        ranks = self.group.size()
        if k.shape[2] < ranks:
            k, v = (t.repeat_interleave(ranks // t.shape[2], dim=2) for t in (k, v))
        sizes = [t.shape[2] // ranks for t in (q, k, v)]
        # of every rank's heads the queries, keys and values side by side, so that one exchange does
        parts = [t.unflatten(2, (ranks, -1)) for t in (q, k, v)]
        whole = exchange_sequence_for_heads(torch.cat(parts, dim=3).flatten(2, 3), self.group)
        if sinks is not None:
            options["sinks"] = sinks.chunk(ranks)[self.group.rank()]
        out = attention(*whole.split(sizes, dim=2), **options)
        return exchange_heads_for_sequence(out, self.group)
