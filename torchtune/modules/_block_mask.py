"""FlexAttention's block mask for packed documents, made on the device in a few operations."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:  # FlexAttention imports the compiler, which takes a second
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128


def document_block_mask(
    cu_seqlens: Tensor, num_tokens: int, window: int = 0, cu_keys: Tensor | None = None, num_keys: int | None = None
) -> "BlockMask":
    """Make the ``BlockMask`` of causal attention within documents, without a ``t × t`` mask and without a host sync.

    A block of queries attends to a contiguous range of key blocks: from the first key of its first document (or of its
    first query's window) to the position of its last query. Key blocks in the same document and inside all windows are
    full blocks.

    Args:
        cu_seqlens: int32 ``[documents + 1]``, cumulative sequence lengths, from 0 to ``num_tokens``.
        num_tokens: t, total number of positions.
        window: sliding window in positions, the query's own included; 0: none.
        cu_keys: int32 ``[documents + 1]``, cumulative numbers of keys, for documents with more keys than queries; the
            queries are then the last positions. By default ``cu_seqlens``.
        num_keys: k, total number of keys; by default t.

    Returns:
        Mask for queries ``[1, n, t, h]`` and keys ``[1, n_kv, k, h]``.
    """
    from torch.nn.attention.flex_attention import BlockMask

    cu_keys, num_keys = (cu_seqlens, num_tokens) if cu_keys is None else (cu_keys, num_keys)
    device = cu_seqlens.device
    positions = torch.arange(num_tokens, device=device)
    document = torch.bucketize(positions, cu_seqlens[1:], right=True)
    document_of_key = torch.bucketize(torch.arange(num_keys, device=device), cu_keys[1:], right=True)
    own_key = positions + (cu_keys - cu_seqlens)[1:].long()[document]  # the key of the query's own position
    starts = torch.arange(0, num_tokens, BLOCK, device=device)
    ends = (starts + BLOCK).clamp(max=num_tokens) - 1  # the last position of every block
    begin = cu_keys[document[starts]].long()  # first key of the block's first document
    seen = begin if not window else torch.maximum(begin, own_key[starts] - window + 1)
    first, last = seen // BLOCK, own_key[ends] // BLOCK
    # Full blocks: after the document's beginning, inside the window of the last query, up to the first query.
    whole_from = torch.where(document[starts] == document[ends], -(-begin // BLOCK), last + 1)
    if window:
        whole_from = torch.maximum(whole_from, (own_key[ends] - window + BLOCK) // BLOCK)
    whole_from = torch.minimum(torch.maximum(whole_from, first), last + 1)
    whole_to = torch.maximum((own_key[starts] + 1) // BLOCK, whole_from)
    order = torch.arange(-(-num_keys // BLOCK), device=device)
    # Partial blocks: from `first` to `whole_from`, and from `whole_to` to `last`.
    before, after = (whole_from - first)[:, None], (last + 1 - whole_to)[:, None]
    partial = torch.where(order < before, first[:, None] + order, whole_to[:, None] + order - before)
    whole = whole_from[:, None] + order

    def sees(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = own_key[q_idx] - kv_idx
        inside = (distance >= 0) & (document[q_idx] == document_of_key[kv_idx])
        return inside & (distance < window) if window else inside

    def counts(x: Tensor) -> Tensor:
        return x.to(torch.int32)[None, None]

    def indices(x: Tensor) -> Tensor:  # entries beyond the count are not read, but must be valid
        return counts(x.clamp(max=len(order) - 1))

    return BlockMask.from_kv_blocks(
        counts((before + after)[:, 0]),
        indices(partial),
        counts(whole_to - whole_from),
        indices(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(num_tokens, num_keys),
    )
