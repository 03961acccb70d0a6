"""Scaled dot-product attention with document masks or other masks, and the choice of its kernel."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Union

import torch
from torch import Tensor
from torch.nn import functional as F

from torchtune.data import Documents
from torchtune.modules._outside_graphs import outside_graphs
from torchtune.modules.kernels.documents import (
    Boundaries,
    attention_by_document,
    check_coverage,
    document_attention,
    prepend_shared_prefix,
)
from torchtune.modules.kernels.flex import compile_friendly_flex_attention, document_block_mask, flex_blocks
from torchtune.modules.kernels.optional import Card, card_of
from torchtune.utils import get_logger, log_once

if TYPE_CHECKING:  # FlexAttention imports the compiler, which takes a second
    from torch.nn.attention.flex_attention import BlockMask


@dataclass(frozen=True)
class TileMask:
    """Attention mask of image tiles that is not materialized.

    An image's real positions come before its padding. Real positions attend to all positions, padding only to real
    ones: Llama 3.2 Vision was trained this way, and its features depend on it.

    Attributes:
        groups: (number of images, real positions of each), in the order of the batch.
    """

    groups: tuple[tuple[int, int], ...]

    @outside_graphs  # so that new image sizes do not recompile
    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0) -> Tensor:
        """Compute attention of queries, keys and values ``[b, s, n, h]``; the result has the same shape."""
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))  # [b, n, s, h]
        outputs = []
        start = 0
        for num_images, num_real in self.groups:
            images = slice(start, start + num_images)
            start += num_images
            queries = q[images]  # [images, n, s, h]
            keys = k[images]
            values = v[images]
            # Two calls without a mask instead of one with a mask: real tokens attend to all tokens, and padding tokens
            # to real ones.
            real_output = F.scaled_dot_product_attention(queries[:, :, :num_real], keys, values, dropout_p=dropout_p)
            outputs_of_group = [real_output]
            if num_real < q.shape[2]:  # the images have padding
                real_keys = keys[:, :, :num_real]
                real_values = values[:, :, :num_real]
                padding_output = F.scaled_dot_product_attention(
                    queries[:, :, num_real:], real_keys, real_values, dropout_p=dropout_p
                )
                outputs_of_group.append(padding_output)
            outputs.append(_concatenate(outputs_of_group, dim=2))
        return _concatenate(outputs, dim=0).transpose(1, 2)


def _concatenate(tensors: list[Tensor], dim: int) -> Tensor:
    """Concatenate tensors, without a copy of a single one."""
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat(tensors, dim)


MaskType = Union[Tensor, "BlockMask", TileMask]

_FLASH_DTYPES = (torch.bfloat16, torch.float16)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    documents: Documents | Boundaries | None = None,
    mask: MaskType | None = None,
    is_causal: bool = True,
    dropout_p: float = 0.0,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Compute scaled dot-product attention, ``softmax(q kᵀ / √h) v``, with grouped-query support.

    Give at most one of ``documents`` and ``mask``. With neither, attention is causal in each row, or full if
    ``is_causal`` is False.

    Args:
        q: queries ``[b, s, n, h]``.
        k: keys ``[b, t, n_kv, h]``; n is a multiple of n_kv.
        v: values ``[b, t, n_kv, h]``.
        documents: boundaries in the flattened ``b * s`` positions; attention stays within each document and its
            shared prefix.
        mask: bool ``[b, s, t]`` (True: attend), a FlexAttention ``BlockMask``, or the tile mask of a
            :class:`VisionTransformer`.
        is_causal: causal attention; ignored with ``mask``. A single query attends to all keys.
        dropout_p: dropout probability of attention weights.
        window: sliding window in positions, the query's own included. With a mask, the last visible key is the query's
            own position.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        sinks: attention sinks ``[n]``: a logit per head in the softmax's denominator (Xiao et al. 2023,
            arXiv:2309.17453).
        chunk: chunk size; a query attends only within its own chunk of the document (Llama 4). With a mask, a query's
            position follows from its number of visible keys.

    Returns:
        Tensor ``[b, s, n, h]``.

    Raises:
        ValueError: both ``documents`` and ``mask``, documents that do not cover the ``b * s`` positions, dropout with a
            window, chunks, a soft cap or sinks, chunks with a ``BlockMask``, documents that are not causal with a
            window, a soft cap or sinks, or several causal queries and another number of keys with a soft cap or sinks.

    Example:
        >>> q = k = v = torch.randn(1, 2, 3, 4)  # [b, s, n, h]
        >>> torchtune.modules.attention(q, k, v).shape
        torch.Size([1, 2, 3, 4])
    """
    _check_arguments(documents, mask, is_causal, dropout_p, window, softcap, sinks, chunk)
    # Kernels of all documents at once do not check. Without num_tokens, the host would wait for the device to know it.
    if documents is not None and documents.num_tokens is not None:
        check_coverage(documents.num_tokens, q.shape[0] * q.shape[1])
    num_queries = q.shape[1]
    num_keys = k.shape[1]
    is_causal_row = documents is None and mask is None and is_causal
    if is_causal_row and num_queries == 1 < num_keys:
        # Decoding: one token after all cached keys, of which it sees those of its window or chunk.
        num_visible = window
        if chunk is not None:  # a layer has a window or chunks, not both
            num_visible = (num_keys - 1) % chunk + 1  # from the beginning of the last key's chunk
        if num_visible is not None:
            k = k[:, -num_visible:]
            v = v[:, -num_visible:]
            num_keys = k.shape[1]
        # All keys that are left are visible: there is nothing to mask.
        is_causal_row = False
        is_causal = False
        window = None
        chunk = None
    if is_causal_row and num_queries != num_keys and (softcap is not None or sinks is not None):
        # The kernel of rows with these options has no causal mask, which rows of equal lengths get as documents.
        raise ValueError(
            f"Causal attention of {num_queries} queries to {num_keys} keys with a soft cap or sinks needs a mask."
        )
    if documents is None:
        # A window or chunk that covers the whole row masks nothing; without it, a kernel that has none can run.
        if window is not None and window >= num_keys:
            window = None
        if chunk is not None and chunk >= num_keys:
            chunk = None
    # Documents have as many keys as queries. With dropout there are no options, and SDPA computes all rows in one call.
    if is_causal_row and not dropout_p and num_queries == num_keys:
        has_options = window is not None or chunk is not None or softcap is not None or sinks is not None
        # The kernels of documents compute all options; on a CPU they are also faster for rows.
        if has_options or q.device.type == "cpu":
            documents = _rows_as_documents(q, chunk)
    if isinstance(mask, Tensor):
        if window is not None:
            mask = mask & _in_window(mask, window)
            window = None  # kernels of a bool mask have none
        if chunk is not None:
            # The query's position follows from its number of visible keys; the chunk up to there is a window.
            position = mask.sum(-1, keepdim=True) - 1  # [b, s, 1]
            mask = mask & _in_window(mask, position % chunk + 1)
    if documents is not None and chunk is not None:
        documents = _split_into_chunks(documents, chunk)  # for a kernel, these are documents

    kernel = choose_kernel(
        q.device,
        q.dtype,
        head_dim=q.shape[-1],
        window=window or 0,
        softcap=softcap or 0.0,
        sinks=sinks is not None,
        dropout=dropout_p > 0.0,
        is_causal=is_causal or mask is not None,  # a mask decides alone, so that no kernel is excluded
        sees=_visibility_of(documents, mask),
    )
    if kernel is Kernel.TILES:
        return mask.attend(q, k, v, dropout_p)
    if kernel is Kernel.BLOCK_MASK:
        heads = [tensor.transpose(1, 2) for tensor in (q, k, v)]  # [b, n or n_kv, s or t, h]
        return compile_friendly_flex_attention(*heads, mask, window, softcap, sinks).transpose(1, 2)
    if kernel is Kernel.SCORES:
        return _scored_attention(q, k, v, mask, softcap, sinks)
    if kernel is Kernel.SDPA:
        return _dense_attention(q, k, v, mask, is_causal_row, dropout_p)
    if kernel is Kernel.PER_DOCUMENT:
        return per_document_attention(q, k, v, documents, is_causal, dropout_p, window or 0, softcap or 0.0, sinks)
    return _packed_attention(kernel, q, k, v, documents, is_causal, window or 0, softcap, sinks)


attention.shares_prefixes = True  # supports Documents.shared


_FIRST_WITH_FLASH = (8, 0)  # compute capability
_FLASH_HEAD_DIM = 256
_SMALLEST_FLEX_HEAD = 16  # triton's tl.dot takes no smaller dimension


class Kernel(Enum):
    """Kernels of attention; the values are descriptions for the log."""

    VARLEN = "torch's varlen_attn (flash attention over documents)"
    FLEX = "flex attention with a block mask of the documents"
    PER_DOCUMENT = "documents one by one"
    SDPA = "torch's scaled_dot_product_attention"
    SCORES = "all scores at once"
    BLOCK_MASK = "flex attention with the given block mask"
    TILES = "images one size after another"


class Visibility(Enum):
    """Form of the attention mask; the values are descriptions for ``tune doctor``."""

    DOCUMENTS = "documents"
    ROWS = "rows"
    MASK = "a bool mask"
    BLOCK_MASK = "a BlockMask"
    TILES = "image tiles"


@dataclass(frozen=True)
class KernelRow:
    """A row of the table of attention's kernels.

    Attributes:
        sees: form of the attention mask.
        kernel: kernel that computes attention with a mask of this form.
        window: whether the kernel supports sliding windows; with a bool mask, the window becomes part of the mask.
        softcap: whether it supports soft caps.
        sinks: whether it supports attention sinks.
        dropout: whether it supports dropout.
        not_causal: whether it supports bidirectional attention.
        cuda_only: whether it requires CUDA.
    """

    sees: Visibility
    kernel: Kernel
    window: bool = False
    softcap: bool = False
    sinks: bool = False
    dropout: bool = False
    not_causal: bool = False
    cuda_only: bool = False

    def features(self) -> list[str]:
        """Return the names of the supported features."""
        words = {
            "windows": self.window,
            "soft caps": self.softcap,
            "sinks": self.sinks,
            "dropout": self.dropout,
            "bidirectional attention": self.not_causal,
        }
        return [word for word, is_computed in words.items() if is_computed]

    def fits_card(self, card: Card | None, dtype: torch.dtype, head_dim: int) -> bool:
        """Return whether a card can run the kernel for a dtype and size of heads; ``None`` is a card like an H100."""
        if self.kernel is Kernel.VARLEN:
            has_flash = card is None or card.capability >= _FIRST_WITH_FLASH
            return has_flash and dtype in _FLASH_DTYPES and head_dim <= _FLASH_HEAD_DIM
        if self.kernel is Kernel.FLEX:
            return head_dim >= _SMALLEST_FLEX_HEAD and flex_blocks(card, head_dim, dtype.itemsize) != 0
        return True


# In the order of preference, fastest first: a call runs the first row that supports its options.
ATTENTION_KERNELS = (
    KernelRow(Visibility.DOCUMENTS, Kernel.VARLEN, window=True, not_causal=True, cuda_only=True),
    KernelRow(Visibility.DOCUMENTS, Kernel.FLEX, window=True, softcap=True, sinks=True, cuda_only=True),
    KernelRow(
        Visibility.DOCUMENTS, Kernel.PER_DOCUMENT, window=True, softcap=True, sinks=True, dropout=True, not_causal=True
    ),
    KernelRow(Visibility.ROWS, Kernel.SDPA, dropout=True, not_causal=True),
    KernelRow(Visibility.ROWS, Kernel.SCORES, softcap=True, sinks=True, not_causal=True),
    KernelRow(Visibility.MASK, Kernel.SDPA, dropout=True),
    KernelRow(Visibility.MASK, Kernel.SCORES, softcap=True, sinks=True),
    KernelRow(Visibility.BLOCK_MASK, Kernel.BLOCK_MASK, window=True, softcap=True, sinks=True),
    KernelRow(Visibility.TILES, Kernel.TILES, dropout=True),
)


def choose_kernel(
    device: torch.device,
    dtype: torch.dtype,
    *,
    head_dim: int = 128,
    window: int = 0,
    softcap: float = 0.0,
    sinks: bool = False,
    dropout: bool = False,
    is_causal: bool = True,
    sees: Visibility = Visibility.DOCUMENTS,
) -> Kernel:
    """Choose the attention kernel: the first row of :data:`ATTENTION_KERNELS` that supports all options.

    Args:
        device: device of the queries.
        dtype: dtype of the queries.
        head_dim: h.
        window: sliding window in positions; 0: none.
        softcap: soft cap of the scores; 0: none.
        sinks: whether there are attention sinks.
        dropout: whether attention weights are dropped.
        is_causal: whether attention is causal.
        sees: form of the attention mask.

    Raises:
        ValueError: no kernel supports the options.
    """
    is_cuda = device.type == "cuda"
    card = None
    if is_cuda:
        _load_varlen()  # here, because compiled layers cannot import the kernel that may be chosen
        card = card_of(device)
    for row in ATTENTION_KERNELS:
        if row.sees is not sees or (row.cuda_only and not is_cuda):
            continue
        if (window and not row.window) or (softcap and not row.softcap):
            continue
        if (sinks and not row.sinks) or (dropout and not row.dropout) or not (is_causal or row.not_causal):
            continue
        if row.fits_card(card, dtype, head_dim):
            return row.kernel
    raise ValueError(
        f"No kernel computes attention over {sees.value} with these options (window {window}, softcap {softcap}, sinks "
        f"{sinks}, dropout {dropout}, causal {is_causal}): give documents or a bool mask."
    )


def describe_attention(device: torch.device) -> list[str]:
    """Return a line about each row of the table that a device can run, in the order of preference."""
    lines = []
    for row in ATTENTION_KERNELS:
        if row.cuda_only and device.type != "cuda":
            continue
        features = ", ".join(row.features())
        lines.append(f"{row.sees.value}: {row.kernel.value}; computes {features}")
    if device.type != "cuda":
        lines.append("causal rows run as documents")
    else:
        lines.append("causal rows with a window, a soft cap, sinks or chunks run as documents")
        lines.append("cuDNN's kernels are not used: they make a plan for every new shape")
    return lines


def _visibility_of(documents: Documents | Boundaries | None, mask: MaskType | None) -> Visibility:
    """Return the form of the attention mask, which selects rows of :data:`ATTENTION_KERNELS`."""
    if documents is not None:
        return Visibility.DOCUMENTS
    if mask is None:
        return Visibility.ROWS
    if isinstance(mask, TileMask):
        return Visibility.TILES
    if isinstance(mask, Tensor):
        return Visibility.MASK
    return Visibility.BLOCK_MASK  # no isinstance: BlockMask is slow to import


def _check_arguments(
    documents: Documents | Boundaries | None,
    mask: MaskType | None,
    is_causal: bool,
    dropout_p: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    chunk: int | None,
) -> None:
    """Raise ``ValueError`` for arguments of :func:`attention` that contradict each other."""
    is_special = bool(window or chunk or softcap or sinks is not None)
    if dropout_p > 0.0 and is_special:
        raise ValueError("Attention with a window, chunks, a soft cap or sinks has no dropout: set attn_dropout to 0.")
    if documents is not None and mask is not None:
        raise ValueError("Attention takes either documents or a mask, not both.")
    if documents is not None and not is_causal and is_special:
        raise ValueError("Attention to all positions of a document has no window, chunks, soft cap or sinks.")
    if _visibility_of(documents, mask) is Visibility.BLOCK_MASK:
        if chunk is not None:
            raise ValueError("Attention in chunks takes documents or a bool mask, not a BlockMask.")
        if dropout_p > 0.0:
            raise ValueError("Flex attention has no dropout: set attn_dropout to 0.")


def _rows_as_documents(q: Tensor, chunk: int | None) -> Documents | Boundaries:
    """Return the boundaries of documents that are the rows of queries ``[b, s, n, h]``."""
    b, s = q.shape[:2]
    if chunk is not None:  # the rows are split further, which boundaries are not
        return Documents.from_lengths([s] * b, q.device)
    cu_seqlens = torch.arange(0, (b + 1) * s, s, dtype=torch.int32, device=q.device)  # [b + 1]
    return Boundaries(cu_seqlens, max_length=s)


def _split_into_chunks(documents: Documents | Boundaries, size: int) -> Boundaries:
    """Return the boundaries of chunks of ``size`` positions in each document."""
    if isinstance(documents, Documents):
        return Boundaries.of(documents.split_into_chunks(size))
    if size not in documents.chunks:
        raise ValueError(f"These boundaries do not say where chunks of {size} begin: give the documents.")
    return documents.chunks[size]


def attention_limits(device: torch.device) -> str:
    """Say which attention a CUDA card can run, for ``tune doctor``."""
    card = card_of(device)
    has_flash = card.capability >= _FIRST_WITH_FLASH
    if has_flash:
        parts = ["flash attention over documents"]
    else:
        parts = ["no flash attention, flex attention instead"]
    for head_dim in (64, 128, 256, 512):
        size = flex_blocks(card, head_dim, itemsize=2)
        if size:
            parts.append(f"flex attention in blocks of {size} for heads of {head_dim}")
        elif size == 0:
            parts.append(f"documents one by one for heads of {head_dim} that flash attention does not take")
    shared_memory = card.shared_memory // 2**10  # KiB
    return f"{shared_memory} KiB of shared memory; {', '.join(parts)}"


def _packed_attention(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents | Boundaries,
    is_causal: bool,
    window: int,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention within documents by a kernel that takes all of them at once."""
    q_flat = q.flatten(0, 1)  # [b * s, n, h]
    k_flat = k.flatten(0, 1)  # [b * s, n_kv, h]
    v_flat = v.flatten(0, 1)
    cu_seqlens = documents.cu_seqlens
    cu_keys = cu_seqlens
    if is_causal and documents.shared is not None:  # bidirectional models take no shared prefixes
        k_flat = prepend_shared_prefix(documents.shared, k_flat)
        v_flat = prepend_shared_prefix(documents.shared, v_flat)
        cu_keys = documents.shared.cu_keys
    if kernel is Kernel.VARLEN:
        out = _varlen_attention(q_flat, k_flat, v_flat, cu_seqlens, cu_keys, documents.max_length, window, is_causal)
        return out.view(q.shape)
    mask = None
    if isinstance(documents, Boundaries):  # the model made the masks, for all layers
        mask = documents.block_masks.get(window)
    if mask is None:  # of causal attention: the table has flex attention for no other
        mask = document_block_mask(cu_seqlens, len(q_flat), window, cu_keys, len(k_flat))
    heads = [tensor.transpose(0, 1)[None] for tensor in (q_flat, k_flat, v_flat)]  # [1, n or n_kv, b * s, h]
    out = compile_friendly_flex_attention(*heads, mask, softcap=softcap or None, sinks=sinks)
    return out[0].transpose(0, 1).reshape(q.shape)


def _in_window(mask: Tensor, window: int | Tensor) -> Tensor:
    """bool ``[b, s, t]``: the window of keys that ends with the last visible key of ``mask``."""
    key_positions = torch.arange(mask.shape[-1], device=mask.device)
    last_visible = (mask * key_positions).amax(-1, keepdim=True)  # [b, s, 1]
    return key_positions > last_visible - window


def _scored_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention with materialized float32 scores, for masks and so for generation; without a mask, to all keys."""
    n_kv = k.shape[2]
    head_dim = q.shape[-1]
    # The m query heads of each of g groups share a key head.
    queries = q.float().unflatten(2, (n_kv, -1)) * head_dim**-0.5  # [b, s, g, m, h]
    scores = torch.einsum("bsgmh,btgh->bgmst", queries, k.float())
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        is_hidden = ~mask[:, None, None]  # [b, 1, 1, s, t]
        scores = scores.masked_fill(is_hidden, float("-inf"))
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        # One more score per query; its weight is left out, because the sink has no value.
        sink_scores = sinks.float().view(1, n_kv, -1, 1, 1)  # [1, g, m, 1, 1]
        sink_scores = sink_scores.expand(*scores.shape[:-1], 1)
        weights_with_sink = torch.cat([scores, sink_scores], -1).softmax(-1)
        weights = weights_with_sink[..., :-1]
    out = torch.einsum("bgmst,btgh->bsgmh", weights, v.float())
    return out.flatten(2, 3).to(q.dtype)  # [b, s, n, h]


def _dense_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, dropout_p: float) -> Tensor:
    """SDPA on ``[b, s, n, h]`` tensors; ``mask`` is bool ``[b, s, t]``.

    ``is_causal`` is False for a single query with several keys: :func:`attention` lets it see all of them.
    """
    b, s, n, h = q.shape
    n_kv = k.shape[2]
    if q.is_cuda:
        card_of(q.device)  # keeps torch from cuDNN's attention, which makes a plan for every new shape
    head_mask = None
    if mask is not None:
        head_mask = mask[:, None]  # [b, 1, s, t]
    if s == 1 and n != n_kv:
        # The queries of a group become positions, [b, n_kv, n / n_kv, h], so that no kernel repeats keys.
        queries = q.view(b, n_kv, -1, h)
        out = F.scaled_dot_product_attention(
            queries, k.transpose(1, 2), v.transpose(1, 2), attn_mask=head_mask, dropout_p=dropout_p
        )
        return out.reshape(b, 1, n, h)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=head_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        enable_gqa=n != n_kv,
    )
    return out.transpose(1, 2)


def per_document_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents | Boundaries,
    is_causal: bool,
    dropout_p: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Compute attention within each document, with one kernel call per run of documents of equal length.

    There is no mask; the work is the sum of the squared lengths. Causal attention without dropout is a custom operator,
    so that compiled layers do not recompile for new lengths.

    Args:
        q: queries ``[b, s, n, h]``.
        k: keys ``[b, s, n_kv, h]``.
        v: values ``[b, s, n_kv, h]``.
        documents: boundaries in the flattened ``b * s`` positions.
        is_causal: whether attention is causal; otherwise there is no window, soft cap and sinks.
        dropout_p: dropout probability of attention weights; must be 0 with a shared prefix.
        window: sliding window in positions, the query's own included; 0: none.
        softcap: soft cap of the scores; 0: none.
        sinks: attention sinks ``[n]``.

    Returns:
        Tensor ``[b, s, n, h]``.
    """
    q_flat = q.flatten(0, 1)  # [b * s, n, h]
    k_flat = k.flatten(0, 1)  # [b * s, n_kv, h]
    v_flat = v.flatten(0, 1)
    shared = documents.shared
    if is_causal and dropout_p > 0.0 and shared is not None:
        raise ValueError("Attention of documents that share a prefix has no dropout: set attn_dropout to 0.")
    if not is_causal or dropout_p > 0.0:
        out = attention_by_document(q_flat, k_flat, v_flat, documents.cu_seqlens, dropout_p, is_causal)
        return out.view(q.shape)
    k_flat = prepend_shared_prefix(shared, k_flat)
    v_flat = prepend_shared_prefix(shared, v_flat)
    cu_keys = None if shared is None else shared.cu_keys
    out = document_attention(q_flat, k_flat, v_flat, documents.cu_seqlens, window, softcap, sinks, cu_keys)
    return out.view(q.shape)


def attention_backend(
    device: torch.device, dtype: torch.dtype, *, documents: bool, mask: bool = False, **kind: Any
) -> str:
    """Return a description of the kernel that :func:`attention` uses, without dropout.

    Args:
        device: device of the queries.
        dtype: dtype of the queries.
        documents: whether attention stays within documents.
        mask: whether there is a mask.
        kind: ``head_dim``, ``window``, ``softcap`` and ``sinks`` of :func:`choose_kernel`.
    """
    if device.type == "cpu" and not mask:  # on a CPU, causal rows run as documents, too
        units = "documents" if documents else "rows"
        return f"{units} one by one, in blocks or by torch's fused kernel after length"
    has_options = kind.get("window") or kind.get("softcap") or kind.get("sinks")
    if mask:
        options = {**kind, "window": 0}  # a window is part of the mask
        kernel = choose_kernel(device, dtype, sees=Visibility.MASK, **options)
        if kernel is Kernel.SDPA:
            return f"{kernel.value} with a mask"
        return kernel.value
    if not documents and not has_options:
        return f"{Kernel.SDPA.value} (flash or memory-efficient), causal"
    kernel = choose_kernel(device, dtype, **kind)  # for documents; rows with options run as documents, too
    if kernel is Kernel.FLEX:
        size = flex_blocks(card_of(device), kind.get("head_dim", 128), dtype.itemsize)  # 128: choose_kernel's default
        if size is not None:  # None: the sizes of torch
            return f"{kernel.value}, in blocks of {size}, which this card can hold"
    return kernel.value


def log_attention_backend(device: torch.device, dtype: torch.dtype, **options: Any) -> None:
    """Log once the kernel that attention uses, with the ``options`` of :func:`attention_backend`."""
    words = {"window": "a window", "softcap": "a soft cap", "sinks": "sinks"}
    features = [word for option, word in words.items() if options.get(option)]
    subject = "Attention"
    if features:
        subject += f" with {' and '.join(features)}"
    backend = attention_backend(device, dtype, **options)
    log_once(get_logger(), f"{subject} on {device.type} in {dtype}: {backend}.")


# torch's varlen_attn, and whether it supports GQA.
_VARLEN: tuple[Callable[..., Tensor], bool] | None = None


def _load_varlen() -> None:
    """Import the kernel at the first attention on CUDA, because it loads the compiler; compiled layers cannot."""
    global _VARLEN
    if _VARLEN is None and not torch.compiler.is_compiling():
        from torch.nn.attention.varlen import varlen_attn

        supports_groups = "enable_gqa" in inspect.signature(varlen_attn).parameters
        _VARLEN = varlen_attn, supports_groups


def _varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    cu_keys: Tensor,
    max_length: int,
    window: int,
    is_causal: bool,
) -> Tensor:
    """Attention of queries ``[t, n, h]`` to keys ``[k, n_kv, h]``; a document's queries are its last positions."""
    varlen_attn, supports_groups = _VARLEN  # loaded when this kernel was chosen
    group = q.shape[1] // k.shape[1]
    # Positions to the left and to the right of the query's own; -1: all.
    window_left = -1
    if window:
        window_left = window - 1  # the window includes the query's own position
    window_right = 0
    if not is_causal:
        # For -1 on both sides, torch 2.14 runs cuDNN's kernel on some cards (see `card_of`). A window as wide as the
        # longest document is none to flash attention.
        window_left = max_length
        window_right = max_length
    options: dict[str, Any] = {"window_size": (window_left, window_right)}
    if group > 1 and supports_groups:
        options["enable_gqa"] = True
    elif group > 1:
        # Each key head once for every query head of its group.
        repeated_k = k[:, :, None].expand(-1, -1, group, -1)  # [k, n_kv, n / n_kv, h]
        repeated_v = v[:, :, None].expand(-1, -1, group, -1)
        k = repeated_k.flatten(1, 2)  # [k, n, h]
        v = repeated_v.flatten(1, 2)
    out = varlen_attn(q, k, v, cu_seqlens, cu_keys, max_length, max_length, **options)
    if not torch.compiler.is_compiling() and out.grad_fn is not None:
        # The kernel's other outputs have no gradient. Its backward pass ignores the zeros that autograd would make.
        out.grad_fn.set_materialize_grads(False)
    return out
