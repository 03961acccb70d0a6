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
    queries = _split_queries(q, k.shape[2])
    out_heads = _split_queries(out, k.shape[2])
    keys = _by_kv_head(k, torch.float32)
    values = _by_kv_head(v, v.dtype)
    for block, seen, _, weights, _ in _iter_blocks(queries, keys, window, softcap, sinks):
        product = torch.bmm(weights.to(v.dtype), values[:, seen])  # [b * n_kv, n / n_kv * block, h]
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
    num_kv_heads = k.shape[2]
    queries = _split_queries(q, num_kv_heads)
    grad_heads = _split_queries(grad, num_kv_heads)
    grad_queries = _split_queries(grad_q, num_kv_heads)
    keys = _by_kv_head(k, k.dtype)  # [b * n_kv, t, h]
    values = _by_kv_head(v, v.dtype)
    # float32 sums over blocks of queries.
    grad_keys = torch.zeros(keys.shape, dtype=torch.float32, device=k.device)
    grad_values = torch.zeros(keys.shape, dtype=torch.float32, device=k.device)
    for block, seen, block_queries, weights, slope in _iter_blocks(queries, keys.float(), window, softcap, sinks):
        block_grad = _take_block(grad_heads, block, grad.dtype)  # [b * n_kv, n / n_kv * block, h]
        grad_values[:, seen] += torch.bmm(weights.to(v.dtype).transpose(1, 2), block_grad)
        grad_weights = torch.bmm(block_grad, values[:, seen].transpose(1, 2)).float()
        grad_scores = torch.ops.aten._softmax_backward_data(grad_weights, weights, -1, torch.float32)
        if grad_sinks is not None:
            # The sink's probability is 1 - the sum of the others, and its value is zero.
            grad_sink = (weights.sum(-1) - 1) * (grad_weights * weights).sum(-1)
            grad_sinks += grad_sink.view(q.shape[0], grad_sinks.shape[0], -1).sum((0, 2))
        if slope is not None:
            grad_scores.mul_(slope)
        grad_scores = grad_scores.mul_(q.shape[-1] ** -0.5).to(q.dtype)
        product = torch.bmm(grad_scores, keys[:, seen])
        grad_queries[:, :, :, block] = product.view(grad_queries[:, :, :, block].shape)
        grad_keys[:, seen] += torch.bmm(grad_scores.transpose(1, 2), block_queries.to(q.dtype))
    # [b * n_kv, t, h] -> [b, t, n_kv, h]
    grad_k.copy_(grad_keys.unflatten(0, (k.shape[0], -1)).transpose(1, 2))
    grad_v.copy_(grad_values.unflatten(0, (k.shape[0], -1)).transpose(1, 2))


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
    """Compute the probabilities of one block of queries after another, in float32.

    Args:
        queries: ``[b, n_kv, n / n_kv, s, h]``.
        keys: float32 ``[b * n_kv, t, h]``.
        window: sliding window in positions; 0: none.
        softcap: soft cap of the scores; 0: none.
        sinks: attention sinks ``[n]``.

    Yields:
        The slice of the block, the slice of the keys that it sees, its queries ``[b * n_kv, n / n_kv * block, h]``,
        probabilities ``[b * n_kv, n / n_kv * block, seen]``, and the derivative of the soft cap, of the same shape.
    """
    group, s, h = queries.shape[2:]
    num_earlier = keys.shape[1] - s  # positions with keys and without queries
    future = _causal_mask(queries.device)
    scaled_keys = keys * h**-0.5
    for start in range(0, s, _BLOCK):
        block = slice(start, min(start + _BLOCK, s))
        size = block.stop - start
        first_position = start + num_earlier  # of the block's first query, among the keys
        first_seen = max(0, first_position - window + 1) if window else 0
        seen = slice(first_seen, first_position + size)
        block_queries = _take_block(queries, block, torch.float32)
        scores = torch.bmm(block_queries, scaled_keys[:, seen].transpose(1, 2))
        slope = None
        if softcap:
            bounded = scores.div_(softcap).tanh_()
            slope = 1 - bounded.square()
            scores = bounded * softcap
        # A view [b * n_kv, n / n_kv, block, seen]: masks are the same for all heads of a group.
        position_scores = scores.unflatten(1, (group, size))
        position_scores[..., first_position - first_seen :] += future[:size, :size]
        if window:
            query_positions = torch.arange(first_position, first_position + size, device=keys.device)
            key_positions = torch.arange(seen.start, seen.stop, device=keys.device)
            distance = query_positions[:, None] - key_positions  # [block, seen]
            position_scores.masked_fill_(distance >= window, float("-inf"))
        if sinks is None:
            weights = scores.softmax(-1)
        else:
            # One more score per query; its probability is left out, because the sink has no value.
            sink_scores = sinks.float().view(-1, group, 1).repeat(queries.shape[0], 1, size)
            sink_scores = sink_scores.view(*scores.shape[:2], 1)
            weights = torch.cat([scores, sink_scores], -1).softmax(-1)[..., :-1]
        yield block, seen, block_queries, weights, slope
