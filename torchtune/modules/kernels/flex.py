"""FlexAttention: its call, the blocks that a card can hold, and its block mask for packed documents."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchtune.modules.kernels.optional import Card, card_of
from torchtune.utils import allow_compiled_versions

if TYPE_CHECKING:  # FlexAttention imports the compiler, which takes a second
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
_LARGE_SHARED_MEMORY = 160 * 2**10
_FLEX_VERSIONS = 64


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


def flex_blocks(card: Card | None, head_dim: int, itemsize: int) -> int | None:
    """Choose the size of flex attention's blocks of queries and keys.

    torch's own sizes are made for cards with 160 KiB of shared memory per block and more. Cards with 99 KiB (compute
    capability 8.6, 8.9, 12.0) or 64 KiB (7.5) cannot hold them for wide heads: the backward pass, the larger of the
    two, keeps blocks of queries, keys, values and the gradient.

    Returns:
        ``None`` for torch's sizes; 0 if no size fits.
    """
    if card is None or card.shared_memory >= _LARGE_SHARED_MEMORY:
        return None

    def needs(size: int) -> int:
        return 4 * size * head_dim * itemsize

    if needs(64) <= 0.9 * card.shared_memory:
        return None
    return next((size for size in (32, 16) if needs(size) <= 0.7 * card.shared_memory), 0)


@functools.cache
def compile_flex_attention() -> Callable[..., Tensor]:
    """Return the compiled ``flex_attention``.

    The second length of a sequence compiles a kernel for all lengths. A window, a soft cap, sinks and a dtype have
    kernels of their own: a process with many of them must not reach the compiler's limit, past which scores are
    materialized.
    """
    from torch.nn.attention.flex_attention import flex_attention

    allow_compiled_versions(_FLEX_VERSIONS)
    return torch.compile(flex_attention)


def compile_friendly_flex_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_mask: "BlockMask",
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute flex attention on ``[b, n, s, h]``, compiled on CUDA unless the caller is being compiled.

    ``window``, ``softcap`` and ``sinks`` are as in :func:`attention`; queries and keys begin at the same position.
    """
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    # A tensor: the compiler makes a symbol of the second float that it sees, which flex attention cannot take.
    cap = None if softcap is None else torch.full((), softcap, dtype=torch.float32, device=q.device)

    def change(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        return score if window is None else torch.where(q_idx - kv_idx < window, score, float("-inf"))

    kernel = compile_flex_attention() if q.is_cuda and not torch.compiler.is_compiling() else flex_attention
    score_mod = None if window is None and softcap is None else change
    options = {"score_mod": score_mod, "block_mask": block_mask, "enable_gqa": q.shape[1] != k.shape[1]}
    # Else torch takes a kernel for decoding below 128 queries, whose blocks of grouped heads do not fit the mask.
    kernel_options: dict[str, Any] = {"FORCE_USE_FLEX_ATTENTION": True}
    size = flex_blocks(card_of(q.device), q.shape[-1], q.dtype.itemsize) if q.is_cuda else None
    if size:
        names = ("BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2")
        kernel_options |= {**dict.fromkeys(names, size), "num_stages": 1}
    options["kernel_options"] = kernel_options
    if sinks is None:
        return kernel(q, k, v, **options)
    out, more = kernel(q, k, v, return_aux=AuxRequest(lse=True), **options)
    return out * torch.sigmoid(more.lse - sinks.float()[:, None]).unsqueeze(-1).to(out.dtype)
