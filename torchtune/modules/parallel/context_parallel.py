"""Attention and recurrent mixers with context parallelism."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from torchtune.modules.attention import MultiHeadAttention
from torchtune.modules.kernels.attention import attention
from torchtune.modules.mixers import Blocks, MixerShare, RecurrentMixer
from torchtune.modules.parallel.collectives import (
    exchange_heads_for_sequence,
    exchange_sequence_for_heads,
    gather_sequence,
)


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
        num_ranks = self.group.size()
        num_kv_heads = k.shape[2]
        if num_kv_heads < num_ranks:
            k = k.repeat_interleave(num_ranks // num_kv_heads, dim=2)
            v = v.repeat_interleave(num_ranks // num_kv_heads, dim=2)
        # Queries, keys and values of each rank's heads side by side, so that one all-to-all suffices.
        by_rank = []
        for heads in (q, k, v):
            by_rank.append(heads.unflatten(2, (num_ranks, -1)))  # [b, s / ranks, ranks, heads / ranks, h]
        sizes = [heads.shape[3] for heads in by_rank]
        shards = torch.cat(by_rank, dim=3).flatten(2, 3)  # [b, s / ranks, n + 2 n_kv, h]
        local_heads = exchange_sequence_for_heads(shards, self.group)  # [b, s, (n + 2 n_kv) / ranks, h]
        if sinks is not None:
            options["sinks"] = sinks.chunk(num_ranks)[self.group.rank()]
        q, k, v = local_heads.split(sizes, dim=2)
        out = attention(q, k, v, **options)  # [b, s, n / ranks, h]
        return exchange_heads_for_sequence(out, self.group)


class SequenceShare(MixerShare):
    """Share of a recurrent mixer's positions and heads, for sequences that are sharded over ranks.

    As in :class:`ContextParallelAttention`, an all-to-all gives each rank some heads of the full sequence, whose states
    no other rank needs. With fewer heads of a block than ranks, its heads are repeated.

    Args:
        group: process group of the ranks that share a sequence, of context and of tensor parallelism.
        tensor_parallel: process group of tensor parallelism, whose ranks are given the same positions and share the
            hidden states; by default there is none.
    """

    def __init__(self, group: dist.ProcessGroup, tensor_parallel: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.tensor_parallel = tensor_parallel

    def local_positions(self, positions: Tensor) -> Tensor:
        """See the base class."""
        if self.tensor_parallel is None:
            return positions
        parts = positions.chunk(self.tensor_parallel.size(), dim=-1)
        return parts[self.tensor_parallel.rank()]

    def num_heads(self, heads: int) -> int:
        """See the base class."""
        return max(heads // self.group.size(), 1)

    def local_channels(self, parameter: Tensor, blocks: Blocks) -> Tensor:
        """See the base class."""
        num_ranks = self.group.size()
        shares = []  # of this rank, of each block
        block_sizes = [heads * head_dim for heads, head_dim in blocks]
        for block, (heads, head_dim) in zip(parameter.split(block_sizes), blocks, strict=True):
            # With fewer heads than ranks, several ranks have the same one.
            first_head = self.group.rank() * heads // num_ranks
            num_channels = self.num_heads(heads) * head_dim
            shares.append(block.narrow(0, first_head * head_dim, num_channels))
        return torch.cat(shares)

    def gather_positions(
        self, channels: Sequence[Tensor], blocks: Sequence[Blocks], reach: Tensor
    ) -> tuple[Sequence[Tensor], Tensor]:
        """See the base class."""
        num_ranks = self.group.size()
        by_rank = []  # [b, s / ranks, ranks, local channels], of each block
        local_sizes = []  # number of a rank's channels, of each tensor
        for tensor, tensor_blocks in zip(channels, blocks, strict=True):
            local_size = 0
            block_sizes = [heads * head_dim for heads, head_dim in tensor_blocks]
            split_tensor = tensor.split(block_sizes, dim=-1)
            for block, (heads, head_dim) in zip(split_tensor, tensor_blocks, strict=True):
                if heads < num_ranks:  # several ranks get the same head
                    by_head = block.unflatten(-1, (heads, head_dim))  # [b, s / ranks, heads, head_dim]
                    block = by_head.repeat_interleave(num_ranks // heads, dim=2).flatten(-2)
                by_rank.append(block.unflatten(-1, (num_ranks, -1)))
                local_size += self.num_heads(heads) * head_dim
            local_sizes.append(local_size)
        # The reach goes along as another channel, which saves a collective. Integers up to 256 are exact in any dtype;
        # mixers compare the reach with 0 and with the few taps of a convolution alone.
        reach_channel = reach.clamp(max=256).to(by_rank[0].dtype)[:, :, None, None]  # [b, s / ranks, 1, 1]
        by_rank.append(reach_channel.expand(-1, -1, num_ranks, 1))
        shards = torch.cat(by_rank, dim=-1)  # [b, s / ranks, ranks, local channels + 1]
        exchanged = exchange_sequence_for_heads(shards, self.group)  # [b, s, 1, local channels + 1]
        *local_channels, full_reach = exchanged.squeeze(2).split([*local_sizes, 1], dim=-1)
        full_reach = full_reach.squeeze(-1).to(reach.dtype)  # [b, s]
        return local_channels, full_reach

    def scatter_positions(self, heads: Tensor) -> Tensor:
        """See the base class."""
        return exchange_heads_for_sequence(heads, self.group)

    def with_earlier_positions(self, x: Tensor, reach: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """See the base class: without an exchange of heads, if only ``count`` positions matter to the next ones."""
        # The end of each shard, of which this rank takes the positions before its own. A shard may be shorter.
        length = x.shape[1]
        num_sent = min(count, length)
        ends = gather_sequence(x[:, length - num_sent :], self.group)  # [b, ranks * num_sent, c]
        earlier = ends[:, : self.group.rank() * num_sent]  # of the ranks before this one
        missing = max(count - earlier.shape[1], 0)  # before the first position of the sequence
        earlier = F.pad(earlier, (0, 0, missing, 0))[:, -count:]  # [b, count, c]
        x = torch.cat([earlier, x], dim=1)  # [b, count + s / ranks, c]

        distance = torch.arange(count, 0, -1, device=reach.device)
        # Earlier positions of other documents are documents of one position.
        earlier_reach = (reach[:, :1] - distance).clamp(min=0)  # [b, count]
        reach = torch.cat([earlier_reach, reach], dim=1)
        return x, reach


def shard_sequences(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Let attention layers and recurrent mixers compute with sequences that are sharded over the ranks of ``group``."""
    for module in model.modules():
        if isinstance(module, MultiHeadAttention):
            module.attention = ContextParallelAttention(group)
    share_mixers(model, SequenceShare(group))


def share_mixers(model: nn.Module, share: SequenceShare) -> None:
    """Let recurrent mixers compute with a share of the positions and heads."""
    for module in model.modules():
        if isinstance(module, RecurrentMixer):
            module.share = share


def shards_sequences(model: nn.Module) -> bool:
    """Return whether attention layers or recurrent mixers of ``model`` compute with parts of sequences."""
    for module in model.modules():
        if isinstance(module, MultiHeadAttention) and isinstance(module.attention, ContextParallelAttention):
            return True
        if isinstance(module, RecurrentMixer) and isinstance(module.share, SequenceShare):
            return True
    return False
