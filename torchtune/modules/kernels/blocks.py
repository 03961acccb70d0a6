"""Causal attention on CPU, computed block by block over the queries; scores and probabilities are float32.

It is for what torch's fused CPU kernel cannot compute: windows, soft caps, sinks, and more keys than queries; and for
the backward pass of short documents in bfloat16, which that kernel computes slowly. Like that kernel, it rounds
normalized probabilities to the dtype of the values. It saves only queries, keys and values; the backward pass
recomputes the probabilities block by block.
"""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

_BLOCK = 128  # queries at a time; measured best from 32 to 192


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> None:
    """Compute causal attention of each row. Queries are the last s of t positions, keys are all t.

    Args:
        q: queries ``[b, s, n, h]``.
        k: keys ``[b, t, n_kv, h]``.
        v: values ``[b, t, n_kv, h]``.
        out: receives the result ``[b, s, n, h]``.
        window: sliding window in positions, the query's own included; 0: none. Scores outside of it are not computed.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0: no soft cap.
        sinks: attention sinks ``[n]``: a logit per head in the softmax's denominator.
    """
    queries, out_heads = (_split_queries(t, k.shape[2]) for t in (q, out))
    values = _by_kv_head(v, v.dtype)
    for block, seen, _, weights, _ in _iter_blocks(queries, _by_kv_head(k, torch.float32), window, softcap, sinks):
        product = torch.bmm(weights.to(v.dtype), values[:, seen])
        out_heads[:, :, :, block] = product.view(out_heads[:, :, :, block].shape)


def block_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    grad_sinks: Tensor | None = None,
) -> None:
    """Run the backward pass of :func:`block_attention` for the output gradient ``[b, s, n, h]``.

    Writes ``grad_q``, ``grad_k`` and ``grad_v``, and adds to ``grad_sinks``.
    """
    queries, grad_heads, grad_queries = (_split_queries(t, k.shape[2]) for t in (q, grad, grad_q))
    keys, values = _by_kv_head(k, k.dtype), _by_kv_head(v, v.dtype)
    grad_keys, grad_values = torch.zeros(2, *keys.shape, dtype=torch.float32, device=k.device)
    for block, seen, queries_now, weights, slope in _iter_blocks(queries, keys.float(), window, softcap, sinks):
        grad_now = _take_block(grad_heads, block, grad.dtype)
        grad_values[:, seen] += torch.bmm(weights.to(v.dtype).transpose(1, 2), grad_now)
        grad_weights = torch.bmm(grad_now, values[:, seen].transpose(1, 2)).float()
        grad_scores = torch.ops.aten._softmax_backward_data(grad_weights, weights, -1, torch.float32)
        if grad_sinks is not None:  # the sink's probability is 1 - sum of the others; its value is zero
            left = (weights.sum(-1) - 1) * (grad_weights * weights).sum(-1)
            grad_sinks += left.view(q.shape[0], grad_sinks.shape[0], -1).sum((0, 2))
        if slope is not None:
            grad_scores.mul_(slope)
        grad_scores = grad_scores.mul_(q.shape[-1] ** -0.5).to(q.dtype)
        product = torch.bmm(grad_scores, keys[:, seen])
        grad_queries[:, :, :, block] = product.view(grad_queries[:, :, :, block].shape)
        grad_keys[:, seen] += torch.bmm(grad_scores.transpose(1, 2), queries_now.to(q.dtype))
    for result, by_head in ((grad_k, grad_keys), (grad_v, grad_values)):
        result.copy_(by_head.unflatten(0, (k.shape[0], -1)).transpose(1, 2))


def _split_queries(x: Tensor, num_kv_heads: int) -> Tensor:
    """``[b, s, n, h]`` as a view ``[b, n_kv, n / n_kv, s, h]``."""
    return x.unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4)


def _by_kv_head(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values ``[b, s, n_kv, h]`` as ``[b * n_kv, s, h]`` of ``dtype``."""
    return x.transpose(1, 2).to(dtype, memory_format=torch.contiguous_format).flatten(0, 1)


def _take_block(x: Tensor, block: slice, dtype: torch.dtype) -> Tensor:
    """A block of positions of ``[b, n_kv, n / n_kv, s, h]`` as ``[b * n_kv, n / n_kv * block, h]`` of ``dtype``."""
    view = x[:, :, :, block]
    return view.to(dtype, memory_format=torch.contiguous_format).flatten(2, 3).flatten(0, 1)


@functools.cache
def _causal_mask(device: torch.device) -> Tensor:
    """Return the causal mask of a diagonal block: -inf above the diagonal, float32 ``[_BLOCK, _BLOCK]``."""
    return torch.full((_BLOCK, _BLOCK), float("-inf"), device=device).triu(1)


def _iter_blocks(
    queries: Tensor, keys: Tensor, window: int, softcap: float, sinks: Tensor | None = None
) -> Iterator[tuple[slice, slice, Tensor, Tensor, Tensor | None]]:
    """Yield for each block of queries: its slice, the slice of visible keys, queries
    ``[b * n_kv, n / n_kv * block, h]``, probabilities ``[b * n_kv, n / n_kv * block, visible]`` and the derivative of
    the soft cap. ``keys`` and results are float32."""
    group, s, h = queries.shape[2:]
    before = keys.shape[1] - s  # positions with keys and without queries
    future = _causal_mask(queries.device)
    scaled_keys = keys * h**-0.5
    for start in range(0, s, _BLOCK):
        block = slice(start, min(start + _BLOCK, s))
        size = block.stop - start
        own = start + before
        seen = slice(max(0, own - window + 1) if window else 0, own + size)
        queries_now = _take_block(queries, block, torch.float32)
        scores, slope = torch.bmm(queries_now, scaled_keys[:, seen].transpose(1, 2)), None
        if softcap:
            bounded = scores.div_(softcap).tanh_()
            slope = 1 - bounded.square()
            scores = bounded * softcap
        by_position = scores.unflatten(1, (group, size))
        by_position[..., own - seen.start :] += future[:size, :size]
        if window:
            distance = torch.arange(own, own + size, device=keys.device)[:, None]
            distance = distance - torch.arange(seen.start, seen.stop, device=keys.device)
            by_position.masked_fill_(distance >= window, float("-inf"))
        if sinks is None:
            weights = scores.softmax(-1)
        else:
            column = sinks.float().view(-1, group, 1).repeat(queries.shape[0], 1, size).view(*scores.shape[:2], 1)
            weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
        yield block, seen, queries_now, weights, slope
