"""Attention masks, and names of flex attention that earlier releases had here; kernels are in ``modules.kernels``."""

from typing import Any

import torch
from torch import Tensor

from torchtune._lazy import former_attribute
from torchtune.modules.kernels.attention import MaskType
from torchtune.modules.kernels.flex import compile_flex_attention
from torchtune.modules.kernels.flex import compile_friendly_flex_attention as compile_friendly_flex_attention

_MaskType = MaskType


def create_block_causal_mask(seq_lens: list[Tensor]) -> Tensor:
    """Return the bool mask ``[b, s, s]`` of causal attention within each packed document.

    Args:
        seq_lens: for each row of the batch, the lengths of its documents; they sum to s.

    Example:
        >>> torchtune.modules.create_block_causal_mask([torch.tensor([1, 2])]).int()
        tensor([[[1, 0, 0],
                 [0, 1, 0],
                 [0, 1, 1]]], dtype=torch.int32)
    """
    masks = []
    for row in seq_lens:
        blocks = [torch.ones(n, n, dtype=torch.bool, device=row.device).tril() for n in row.tolist()]
        masks.append(torch.block_diag(*blocks))  # [s, s]
    return torch.stack(masks)


def packed_block_causal_mask(seq_lens: list[Tensor]) -> MaskType:
    """Return the mask of :func:`create_block_causal_mask`, on CUDA as a ``BlockMask`` that is never materialized.

    Batches with :class:`torchtune.data.Documents` need no mask.

    Example:
        >>> torchtune.modules.packed_block_causal_mask([torch.tensor([1, 2])]).int()
        tensor([[[1, 0, 0],
                 [0, 1, 0],
                 [0, 1, 1]]], dtype=torch.int32)
    """
    if seq_lens[0].device.type != "cuda":
        return create_block_causal_mask(seq_lens)
    from torch.nn.attention.flex_attention import create_block_mask

    device = seq_lens[0].device
    rows = []  # the number of each position's document, [s]
    for lengths in seq_lens:
        rows.append(torch.arange(len(lengths), device=device).repeat_interleave(lengths.to(torch.int64)))
    ids = torch.stack(rows)  # [b, s]

    def same_document(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (ids[b, q_idx] == ids[b, kv_idx])

    return create_block_mask(same_document, ids.shape[0], None, ids.shape[1], ids.shape[1], device=device)


def kv_offset_mask_flex(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, offset: int) -> Tensor:
    """Return the causal mask (a flex ``mask_mod``) for queries that start ``offset`` positions into the cache."""
    return kv_idx <= q_idx + offset


def causal_mask_flex(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Return the causal mask (a flex ``mask_mod``)."""
    return q_idx >= kv_idx


def __getattr__(name: str) -> Any:
    if name == "flex_attention_compiled":  # the name in older releases; compiled at the first call
        return compile_flex_attention()
    return former_attribute(__name__, name)
