"""Document-masked attention as a custom operator, which the compiler does not trace into."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from torchtune.data._documents import Documents
from torchtune.modules._block_attention import block_attention, block_attention_backward, suits_blocks
from torchtune.modules._block_mask import document_block_mask
from torchtune.modules._sinks import add_sinks, sinks_gradient

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


@dataclass(frozen=True)
class Boundaries:
    """Document boundaries as kernels take them, without values that the compiler would specialise on.

    Attributes:
        cu_seqlens: int32 ``[documents + 1]``, cumulative sequence lengths.
        max_length: upper bound of the sequence lengths, rounded up so that it takes few values.
        block_masks: window (0: none) -> FlexAttention's block mask, shared by all layers.
        chunks: size -> boundaries of the documents' chunks of that size.
    """

    cu_seqlens: Tensor
    max_length: int
    block_masks: dict[int, "BlockMask"] = field(default_factory=dict)
    chunks: dict[int, "Boundaries"] = field(default_factory=dict)

    @classmethod
    def of(
        cls, documents: Documents, step: int = 512, block_masks: Iterable[int] = (), chunks: Iterable[int] = ()
    ) -> "Boundaries":
        """Make the boundaries of documents.

        Args:
            documents: the documents of the batch.
            step: ``max_length`` is a multiple of it.
            block_masks: windows of the layers that run FlexAttention.
            chunks: sizes of the chunks in which layers attend.
        """
        masks = {w: document_block_mask(documents.cu_seqlens, documents.num_tokens, w) for w in block_masks}
        parts = {size: cls.of(documents.in_chunks(size), step, block_masks) for size in chunks}
        return cls(documents.cu_seqlens, -(-documents.max_length // step) * step, masks, parts)


def _runs(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Consecutive documents of equal length: (length, how many)."""
    return [(length, sum(1 for _ in run)) for length, run in groupby(lengths)]


def _run_attention(length: int, count: int, q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0) -> Tensor:
    """Causal attention of ``count`` documents ``[count * length, n, h]`` of equal length, as a batch."""
    q, k, v = (t.unflatten(0, (count, length)).transpose(1, 2) for t in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True, enable_gqa=grouped)
    return out.transpose(1, 2).flatten(0, 1)


def _pieces(cu_seqlens: Tensor, *tensors: Tensor) -> Iterator[tuple[int, int, tuple[Tensor, ...]]]:
    """Yield every run of documents of equal length: length, count, and its slice of each tensor ``[t, …]``."""
    start = 0
    for length, count in _runs(cu_seqlens.diff().tolist()):
        end = start + length * count
        yield length, count, tuple(tensor[start:end] for tensor in tensors)
        start = end
    if start != tensors[0].shape[0]:
        raise ValueError(f"The documents cover {start} positions, the batch has {tensors[0].shape[0]}.")


def _in_blocks(q: Tensor, length: int, window: int, softcap: float, sinks: Tensor | None) -> bool:
    """Whether a document of ``length`` runs in blocks: no other kernel supports it, or blocks are faster."""
    if window or softcap or q.device.type != "cpu":
        return True
    return suits_blocks(length, q.dtype)


@torch.library.custom_op("torchtune::document_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    sinks: Tensor | None = None,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    for length, count, (q_run, k_run, v_run, out_run, lse_run) in _pieces(cu_seqlens, q, k, v, out, lse):
        rows = [t.unflatten(0, (count, length)) for t in (q_run, k_run, v_run)]
        here = window if window < length else 0
        if _in_blocks(q, length, here, softcap, sinks):
            block_attention(*rows, out_run.unflatten(0, (count, length)), here, softcap, sinks)
        else:
            heads = (t.transpose(1, 2) for t in rows)
            attended, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*heads, 0.0, True)
            if sinks is not None:
                attended, sums = add_sinks(attended, sums, sinks)
            out_run.unflatten(0, (count, length)).copy_(attended.transpose(1, 2))
            lse_run.unflatten(0, (count, length)).copy_(sums.transpose(1, 2))
    return out, lse


@torch.library.custom_op("torchtune::document_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    sinks: Tensor | None = None,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    grad_sinks = torch.zeros(q.shape[1], dtype=torch.float32, device=q.device)
    for length, count, parts in _pieces(cu_seqlens, grad, q, k, v, out, lse, *grads):
        inputs, results = parts[:6], parts[6:]
        rows = [t.unflatten(0, (count, length)) for t in inputs]
        here = window if window < length else 0
        if _in_blocks(q, length, here, softcap, sinks):
            outputs = (t.unflatten(0, (count, length)) for t in results)
            more = {} if sinks is None else {"sinks": sinks, "grad_sinks": grad_sinks}
            block_attention_backward(*rows[:4], *outputs, here, softcap, **more)
            continue
        heads = [t.transpose(1, 2) for t in rows]
        if sinks is not None:
            grad_sinks += sinks_gradient(heads[0], heads[4], heads[5], sinks)
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*heads, 0.0, True)
        found = [t.transpose(1, 2).flatten(0, 1) for t in found]
        for result, value in zip(results, found, strict=True):
            result.copy_(value)
    return *grads, grad_sinks


@_forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    sinks: Tensor | None = None,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)


@_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    sinks: Tensor | None = None,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_sinks = torch.empty(q.shape[1], dtype=torch.float32, device=q.device)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), grad_sinks


def _setup_context(ctx, inputs: tuple[Tensor | int | float | None, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.window, ctx.softcap = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward_formula(ctx, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, cu_seqlens, sinks, out, lse = ctx.saved_tensors
    *grads, grad_sinks = _backward(grad, q, k, v, out, lse, cu_seqlens, sinks, ctx.window, ctx.softcap)
    return *grads, None, None if sinks is None else grad_sinks.to(sinks.dtype), None, None


_forward.register_autograd(_backward_formula, setup_context=_setup_context)


def document_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention within each document.

    Args:
        q: queries ``[t, n, h]``, packed documents.
        k: keys ``[t, n_kv, h]``.
        v: values ``[t, n_kv, h]``.
        cu_seqlens: int32 ``[documents + 1]``, cumulative sequence lengths, from 0 to t.
        window: sliding window in positions, the query's own included; 0: none.
        softcap: soft cap of the scores; 0: none.
        sinks: attention sinks ``[n]``: a logit per head in the softmax's denominator.

    Returns:
        Tensor ``[t, n, h]``.

    Raises:
        ValueError: the documents do not cover the positions.
    """
    return _forward(q, k, v, cu_seqlens, sinks, window, softcap)[0]


def document_attention_with_dropout(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, dropout_p: float) -> Tensor:
    """:func:`document_attention` with dropout of attention weights."""
    pieces = _pieces(cu_seqlens, q, k, v)
    return torch.cat([_run_attention(length, count, *parts, dropout_p) for length, count, parts in pieces])
