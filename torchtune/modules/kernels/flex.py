"""FlexAttention: its call, the blocks that a card can hold, and its block mask for packed documents."""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchtune.modules.kernels.optional import Card, card_of
from torchtune.utils import allow_compiled_versions

if TYPE_CHECKING:  # FlexAttention imports the compiler, which takes a second
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # positions per block of the mask
_LARGE_SHARED_MEMORY = 160 * 2**10  # bytes per block of threads, for which torch's own sizes are made
_FLEX_VERSIONS = 64  # compiled kernels per process


def document_block_mask(
    cu_seqlens: Tensor,
    num_tokens: int,
    window: int = 0,
    cu_keys: Tensor | None = None,
    num_keys: int | None = None,
    device: torch.device | None = None,
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
        device: device of the mask; by default that of ``cu_seqlens``, on which the mask is computed. Of boundaries on
            the host it reaches a CUDA device in one copy, instead of some eighty launches.

    Returns:
        Mask for queries ``[1, n, t, h]`` and keys ``[1, n_kv, k, h]``.
    """
    from torch.nn.attention.flex_attention import BlockMask

    if cu_keys is None:
        cu_keys = cu_seqlens
        num_keys = num_tokens
    source = cu_seqlens.device
    positions = torch.arange(num_tokens, device=source)
    key_positions = torch.arange(num_keys, device=source)
    document = torch.bucketize(positions, cu_seqlens[1:], right=True)  # [t]
    document_of_key = torch.bucketize(key_positions, cu_keys[1:], right=True)  # [k]
    # The key of a query's own position. A document's queries are its last positions: before them come the keys of its
    # prefix, and those of the prefixes of all earlier documents.
    num_earlier_keys = (cu_keys - cu_seqlens)[1:].long()  # [documents]
    own_key = positions + num_earlier_keys[document]  # [t]

    # Partial blocks: from `first` to `full_from`, and from `full_to` to `last`.
    first, full_from, full_to, last = _range_of_key_blocks(cu_keys, document, own_key, window)
    num_key_blocks = -(-num_keys // BLOCK)  # rounded up
    order = torch.arange(num_key_blocks, device=source)  # [key blocks]
    num_before = (full_from - first)[:, None]  # [query blocks, 1]
    num_after = (last + 1 - full_to)[:, None]
    blocks_before = first[:, None] + order  # [query blocks, key blocks]
    blocks_after = full_to[:, None] + order - num_before  # listed after the `num_before` ones
    partial_blocks = torch.where(order < num_before, blocks_before, blocks_after)
    full_blocks = full_from[:, None] + order

    # BlockMask takes int32 with dimensions for batch and heads, [1, 1, query blocks] and so on.
    def counts(x: Tensor) -> Tensor:
        return x.to(torch.int32)[None, None]

    def indices(x: Tensor) -> Tensor:  # entries beyond the count are not read, but must be valid
        return counts(x.clamp(max=num_key_blocks - 1))

    mask = BlockMask.from_kv_blocks(
        counts((num_before + num_after)[:, 0]),
        indices(partial_blocks),
        counts(full_to - full_from),
        indices(full_blocks),
        BLOCK_SIZE=BLOCK,
        seq_lengths=(num_tokens, num_keys),
    )
    # The same mask on the target device; `from_kv_blocks` has derived the lists of the backward pass.
    lists = [getattr(mask, name) for name in _BLOCK_LISTS]
    tensors = _copy_to_device([own_key, document, document_of_key, *lists], device or source)
    own_key, document, document_of_key, *lists = tensors
    return BlockMask(
        (num_tokens, num_keys),
        **dict(zip(_BLOCK_LISTS, lists, strict=True)),
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=_sees(own_key, document, document_of_key, window),
    )


def _range_of_key_blocks(
    cu_keys: Tensor, document: Tensor, own_key: Tensor, window: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the blocks of keys that each block of queries sees.

    Args:
        cu_keys: cumulative numbers of keys ``[documents + 1]``.
        document: document of each query ``[t]``.
        own_key: the key of each query's own position ``[t]``.
        window: sliding window in positions; 0: none.

    Returns:
        ``[query blocks]`` each: the first block of keys, the first one that all queries of the block see whole, the one
        after the last of these, and the last block of keys.
    """
    num_tokens = len(document)
    first_queries = torch.arange(0, num_tokens, BLOCK, device=document.device)
    last_queries = (first_queries + BLOCK).clamp(max=num_tokens) - 1
    document_begin = cu_keys[document[first_queries]].long()  # first key of the block's first document
    first_key = document_begin
    if window:
        first_key = torch.maximum(document_begin, own_key[first_queries] - window + 1)
    first = first_key // BLOCK
    last = own_key[last_queries] // BLOCK

    # Full blocks: after the document's beginning (rounded up), inside the window of the last query, up to the first
    # query. Blocks of several documents have none: the range begins after the last block.
    is_one_document = document[first_queries] == document[last_queries]
    full_from = torch.where(is_one_document, -(-document_begin // BLOCK), last + 1)
    if window:
        first_full_key = own_key[last_queries] - (window - 1)
        full_from = torch.maximum(full_from, (first_full_key + (BLOCK - 1)) // BLOCK)  # rounded up
    # Between the first and the last block, and not before `full_from`, so that no number of blocks is negative.
    full_from = torch.minimum(torch.maximum(full_from, first), last + 1)
    full_to = torch.maximum((own_key[first_queries] + 1) // BLOCK, full_from)
    return first, full_from, full_to, last


# The lists of blocks in a BlockMask: by block of queries, and by block of keys for the backward pass.
_BLOCK_LISTS = (
    "kv_num_blocks",
    "kv_indices",
    "full_kv_num_blocks",
    "full_kv_indices",
    "q_num_blocks",
    "q_indices",
    "full_q_num_blocks",
    "full_q_indices",
)


def _sees(own_key: Tensor, document: Tensor, document_of_key: Tensor, window: int) -> Callable[..., Tensor]:
    """Return the function that says which keys a query sees.

    Args:
        own_key: the key of each query's own position ``[t]``.
        document: document of each query ``[t]``.
        document_of_key: document of each key ``[k]``.
        window: sliding window in positions; 0: none.
    """

    def sees(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = own_key[q_idx] - kv_idx
        is_visible = (distance >= 0) & (document[q_idx] == document_of_key[kv_idx])
        if window:
            is_visible = is_visible & (distance < window)
        return is_visible

    return sees


_ALIGNMENT = 32  # elements: kernels are compiled for tensors that begin at a multiple of 16 bytes


def _copy_to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return the tensors as int32 on a device; from the host to a CUDA device in one copy, for which nothing waits."""
    is_copy_to_cuda = device.type == "cuda" and tensors[0].device.type != "cuda"
    if not is_copy_to_cuda:
        return [tensor.to(device, torch.int32) for tensor in tensors]
    ranges = []  # of the tensors in the packed one
    total = 0
    for tensor in tensors:
        ranges.append(slice(total, total + tensor.numel()))
        total += -(-tensor.numel() // _ALIGNMENT) * _ALIGNMENT  # rounded up
    packed = torch.empty(total, dtype=torch.int32, device="cpu", pin_memory=True)
    for tensor, elements in zip(tensors, ranges, strict=True):
        packed[elements] = tensor.flatten()
    packed = packed.to(device, non_blocking=True)
    return [packed[elements].view(tensor.shape) for tensor, elements in zip(tensors, ranges, strict=True)]


def flex_blocks(card: Card | None, head_dim: int, itemsize: int) -> int | None:
    """Choose the size of flex attention's blocks of queries and keys.

    torch's own sizes are made for cards with 160 KiB of shared memory per block and more. Cards with 99 KiB (compute
    capability 8.6, 8.9, 12.0) or 64 KiB (7.5) cannot hold them for wide heads: the backward pass, the larger of the
    two, keeps blocks of queries, keys, values and the gradient.

    Args:
        card: the card; None: one like an H100.
        head_dim: h.
        itemsize: bytes of an element of queries and keys.

    Returns:
        ``None`` for torch's sizes; 0 if no size fits.
    """
    if card is None or card.shared_memory >= _LARGE_SHARED_MEMORY:
        return None

    def required_bytes(size: int) -> int:
        return 4 * size * head_dim * itemsize  # queries, keys, values and the gradient

    # The factors leave room for the scores and sums that the kernel also keeps in shared memory.
    if required_bytes(64) <= 0.9 * card.shared_memory:
        return None
    for size in (32, 16):
        if required_bytes(size) <= 0.7 * card.shared_memory:
            return size
    return 0


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
    """Compute flex attention, compiled on CUDA unless the caller is being compiled.

    Args:
        q: queries ``[b, n, s, h]``, which begin at the same position as the keys.
        k: keys ``[b, n_kv, t, h]``.
        v: values ``[b, n_kv, t, h]``.
        block_mask: the mask of queries and keys.
        window: as in :func:`attention`.
        softcap: as in :func:`attention`.
        sinks: as in :func:`attention`.

    Returns:
        Tensor ``[b, n, s, h]``.
    """
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    cap = None
    if softcap is not None:
        # A tensor: the compiler makes a symbol of the second float that it sees, which flex attention cannot take.
        cap = torch.full((), softcap, dtype=torch.float32, device=q.device)

    def cap_and_window(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        if window is not None:
            score = torch.where(q_idx - kv_idx < window, score, float("-inf"))
        return score

    # Otherwise torch runs its decoding kernel below 128 queries, whose blocks of grouped heads do not fit the mask.
    kernel_options: dict[str, Any] = {"FORCE_USE_FLEX_ATTENTION": True}
    size = None
    if q.is_cuda:
        size = flex_blocks(card_of(q.device), q.shape[-1], q.dtype.itemsize)
    if size:  # None: torch's own sizes; 0: no size fits, for which choose_kernel has another kernel of documents
        for name in ("BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2"):
            kernel_options[name] = size
        kernel_options["num_stages"] = 1  # every further stage keeps more blocks in shared memory
    has_score_mod = window is not None or softcap is not None
    options = {
        "score_mod": cap_and_window if has_score_mod else None,
        "block_mask": block_mask,
        "enable_gqa": q.shape[1] != k.shape[1],
        "kernel_options": kernel_options,
    }
    kernel = flex_attention
    if q.is_cuda and not torch.compiler.is_compiling():
        kernel = compile_flex_attention()
    if sinks is None:
        return kernel(q, k, v, **options)
    out, aux = kernel(q, k, v, return_aux=AuxRequest(lse=True), **options)
    # A sink is one more term of the softmax's denominator: the keys' share is exp(lse) / (exp(lse) + exp(sink)).
    share = torch.sigmoid(aux.lse - sinks.float()[:, None])  # [b, n, s]
    return out * share.unsqueeze(-1).to(out.dtype)
