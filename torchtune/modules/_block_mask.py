"""FlexAttention's block mask for packed documents, made on the device in a few operations."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:  # FlexAttention imports the compiler, which takes a second
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128


def document_block_mask(cu_seqlens: Tensor, num_tokens: int, window: int = 0) -> "BlockMask":
    """Make the ``BlockMask`` of causal attention within documents, without a ``t × t`` mask and without a host sync.

    A block of queries sees a contiguous range of key blocks: from the block where its first document (or the window of
    its first query) begins to its own block. Key blocks in the same document and inside all windows are full blocks.

    Args:
        cu_seqlens: int32 ``[documents + 1]``, cumulative sequence lengths, from 0 to ``num_tokens``.
        num_tokens: t, total number of positions.
        window: sliding window in positions, the query's own included; 0: none.

    Returns:
        Mask for queries and keys ``[1, n, t, h]``.
    """
    from torch.nn.attention.flex_attention import BlockMask

    device = cu_seqlens.device
    document = torch.bucketize(torch.arange(num_tokens, device=device), cu_seqlens[1:], right=True)
    starts = torch.arange(0, num_tokens, BLOCK, device=device)
    ends = (starts + BLOCK).clamp(max=num_tokens) - 1  # the last position of every block
    begin = cu_seqlens[document[starts]].long()  # where the first document of the block begins
    seen = begin if not window else torch.maximum(begin, starts - window + 1)
    block = starts // BLOCK
    first = seen // BLOCK
    # Full blocks: after the document's beginning, inside the window of the last query, before the diagonal block.
    whole_from = torch.where(document[starts] == document[ends], -(-begin // BLOCK), block)
    if window:
        whole_from = torch.maximum(whole_from, (ends - window + BLOCK) // BLOCK)
    whole_from = torch.minimum(torch.maximum(whole_from, first), block)
    order = torch.arange(len(starts), device=device)
    # Partial blocks: from `first` to `whole_from`, and the diagonal block.
    before = (whole_from - first)[:, None]
    partial = torch.where(order < before, first[:, None] + order, block[:, None])
    whole = whole_from[:, None] + order

    def sees(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        inside = (q_idx >= kv_idx) & (document[q_idx] == document[kv_idx])
        return inside & (q_idx - kv_idx < window) if window else inside

    def counts(x: Tensor) -> Tensor:
        return x.to(torch.int32)[None, None]

    def indices(x: Tensor) -> Tensor:  # what lies beyond the count is not read, but must be a block
        return counts(x.clamp(max=len(starts) - 1))

    return BlockMask.from_kv_blocks(
        counts(before[:, 0] + 1),
        indices(partial),
        counts(block - whole_from),
        indices(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(num_tokens, num_tokens),
    )
