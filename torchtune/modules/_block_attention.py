"""Causal attention for the CPU, in blocks of queries, by plain matrix products in float32.

For documents of up to about a thousand tokens this takes half to three quarters of the time of torch's fused CPU
kernel (more so in bfloat16, whose backward pass is slow there), and rounds only its results. It keeps nothing but
queries, keys and values: the probabilities are computed again in the backward pass, a block at a time.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

_BLOCK = 64  # queries at a time; measured best from 32 to 256


def suits_blocks(length: int, dtype: torch.dtype) -> bool:
    """Whether blocks are the faster way for a document of ``length`` tokens on a CPU (measured on x86, AVX-512)."""
    return 128 <= length <= 2048 if dtype == torch.float32 else length <= 1024


def block_attention(q: Tensor, k: Tensor, v: Tensor, window: int = 0, softcap: float = 0.0) -> Tensor:
    """Causal attention of each row with itself.

    Args:
        q: queries ``[b, s, n, h]``.
        k: keys ``[b, s, n_kv, h]``.
        v: values ``[b, s, n_kv, h]``.
        window: how many positions a query sees, itself the last; 0: all before it. Keys outside cost nothing.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0: they stay.

    Returns:
        Tensor ``[b, s, n, h]`` of the dtype of ``q``.
    """
    heads = _by_kv_head(q, k, v)
    out = torch.empty_like(q)
    out_heads = _split_queries(out, k.shape[2])
    for block, seen, _, weights, _ in _blocks(*heads[:2], window, softcap):
        product = torch.bmm(weights, heads[2][:, seen])
        out_heads[:, :, :, block] = product.view(out_heads[:, :, :, block].shape)
    return out


def block_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, window: int = 0, softcap: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`block_attention` with respect to its inputs, from that of its result, ``[b, s, n, h]``."""
    queries, keys, values = _by_kv_head(q, k, v)
    grad_heads = _split_queries(grad.float(), k.shape[2])
    grad_q = torch.empty_like(q)
    grad_queries = _split_queries(grad_q, k.shape[2])
    grad_keys, grad_values = torch.zeros_like(keys), torch.zeros_like(values)
    for block, seen, queries_now, weights, slope in _blocks(queries, keys, window, softcap):
        grad_now = grad_heads[:, :, :, block].reshape(queries_now.shape)
        grad_values[:, seen] += torch.bmm(weights.transpose(1, 2), grad_now)
        grad_weights = torch.bmm(grad_now, values[:, seen].transpose(1, 2))
        grad_scores = torch.ops.aten._softmax_backward_data(grad_weights, weights, -1, torch.float32)
        if slope is not None:
            grad_scores = grad_scores * slope
        product = torch.bmm(grad_scores, keys[:, seen]).mul_(q.shape[-1] ** -0.5)
        grad_queries[:, :, :, block] = product.view(grad_queries[:, :, :, block].shape)
        grad_keys[:, seen] += torch.bmm(grad_scores.transpose(1, 2), queries_now)
    shape = (k.shape[0], k.shape[2], *k.shape[1::2])
    return grad_q, *(t.view(shape).transpose(1, 2).to(k.dtype) for t in (grad_keys, grad_values))


def _split_queries(x: Tensor, num_kv_heads: int) -> Tensor:
    """``[b, s, n, h]`` as a view ``[b, n_kv, n / n_kv, s, h]``."""
    return x.unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4)


def _by_kv_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """float32: scaled queries ``[b, n_kv, n / n_kv, s, h]``, keys and values ``[b * n_kv, s, h]``."""
    queries = _split_queries(q.float() * q.shape[-1] ** -0.5, k.shape[2])
    keys, values = (t.float().transpose(1, 2).flatten(0, 1) for t in (k, v))
    return queries, keys, values


def _blocks(
    queries: Tensor, keys: Tensor, window: int, softcap: float
) -> Iterator[tuple[slice, slice, Tensor, Tensor, Tensor | None]]:
    """For each block of positions: its slice, the slice of the keys that it sees, its queries
    ``[b * n_kv, n / n_kv * block, h]``, its attention weights ``[b * n_kv, n / n_kv * block, seen]``, and the
    derivative of the soft cap."""
    _, _, group, s, h = queries.shape
    future = torch.full((_BLOCK, _BLOCK), float("-inf"), device=keys.device).triu(1)
    for start in range(0, s, _BLOCK):
        block = slice(start, min(start + _BLOCK, s))
        size = block.stop - start
        seen = slice(max(0, start - window + 1) if window else 0, block.stop)
        queries_now = queries[:, :, :, block].reshape(-1, group * size, h)
        scores, slope = torch.bmm(queries_now, keys[:, seen].transpose(1, 2)), None
        if softcap:
            bounded = scores.div_(softcap).tanh_()
            slope = 1 - bounded.square()
            scores = bounded * softcap
        by_position = scores.view(-1, group, size, seen.stop - seen.start)
        by_position[..., start - seen.start :] += future[:size, :size]
        if window:
            distance = torch.arange(start, block.stop, device=keys.device)[:, None]
            distance = distance - torch.arange(seen.start, seen.stop, device=keys.device)
            by_position.masked_fill_(distance >= window, float("-inf"))
        yield block, seen, queries_now, scores.softmax(-1), slope
