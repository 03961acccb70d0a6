"""Document-masked attention as a custom operator, which the compiler does not trace into, and its kernel on the CPU."""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from torchtune.data import Documents, SharedPrefixes
from torchtune.modules.kernels.flex import document_block_mask
from torchtune.utils import has_bfloat16_vectors_only

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class SeparatedRow(NamedTuple):
    """A row with all positions of a batch in which gaps separate the documents, for convolutions within documents.

    Attributes:
        index: place of each position in the row, int64 ``[t]``.
        length: number of places up to the last document's end.
        gap: number of places between two documents.
    """

    index: Tensor
    length: int
    gap: int


@dataclass(frozen=True)
class Boundaries:
    """Document boundaries for kernels, without Python values that the compiler would specialize on.

    Attributes:
        cu_seqlens: int32 ``[documents + 1]``, cumulative sequence lengths.
        max_length: number of keys of the longest document, in Python. The compiler makes it a symbol once it has seen
            two values; it is not rounded, so that the second batch already has another one.
        block_masks: window (0: none) -> FlexAttention's block mask, shared by all layers.
        chunks: chunk size -> boundaries of the documents' chunks.
        shared: prefixes that documents share.
        num_tokens: number of positions in all documents, known on the host; ``None`` if only the device knows it.
        kernel_chunks: chunks of a recurrent mixer's kernel, see :func:`index_chunks`; ``None`` if no layer has one.
        separated: the documents with gaps between them; ``None`` if no layer needs them.
    """

    cu_seqlens: Tensor
    max_length: int
    block_masks: dict[int, "BlockMask"] = field(default_factory=dict)
    shared: SharedPrefixes | None = None
    chunks: dict[int, "Boundaries"] = field(default_factory=dict)
    num_tokens: int | None = None
    kernel_chunks: Tensor | None = None
    separated: SeparatedRow | None = None

    @classmethod
    def of(
        cls,
        documents: Documents,
        block_masks: Iterable[int] = (),
        chunks: Iterable[int] = (),
        kernel_chunk: int | None = None,
        gap: int = 0,
    ) -> "Boundaries":
        """Make the boundaries of documents.

        Args:
            documents: the documents of the batch.
            block_masks: windows of the layers that run FlexAttention.
            chunks: sizes of the chunks in which layers attend.
            kernel_chunk: size of the chunks of recurrent mixers' kernel.
            gap: number of places between documents in :attr:`separated`; 0: no layer needs it.
        """
        kernel_chunks = None
        if kernel_chunk is not None:
            kernel_chunks = index_chunks(documents, kernel_chunk)
        boundaries_of_chunks = {}
        for size in chunks:
            # For attention, the chunks of documents are documents. Recurrent mixers read the documents themselves.
            boundaries_of_chunks[size] = cls.of(documents.split_into_chunks(size), block_masks)
        separated = None
        if gap:
            separated = separate(documents, gap)
        return cls(
            cu_seqlens=documents.cu_seqlens,
            max_length=documents.max_length,
            block_masks={window: _block_mask(documents, window) for window in block_masks},
            shared=documents.shared,
            chunks=boundaries_of_chunks,
            num_tokens=documents.num_tokens,
            kernel_chunks=kernel_chunks,
            separated=separated,
        )


def _block_mask(documents: Documents, window: int) -> "BlockMask":
    """Make FlexAttention's block mask on the host, which knows the lengths, for the documents' device."""
    cu_queries = torch.tensor([0, *accumulate(documents.lengths)], dtype=torch.int32, device="cpu")
    device = documents.cu_seqlens.device
    if not documents.prefixes:
        return document_block_mask(cu_queries, documents.num_tokens, window, device=device)
    num_keys = []  # of each document, with those of its prefix
    for num_earlier, length in zip(documents.before, documents.lengths, strict=True):
        num_keys.append(num_earlier + length)
    cu_keys = torch.tensor([0, *accumulate(num_keys)], dtype=torch.int32, device="cpu")
    return document_block_mask(cu_queries, documents.num_tokens, window, cu_keys, sum(num_keys), device)


def index_chunks(documents: Documents, size: int) -> Tensor:
    """Return the document of every chunk and the chunk's number in it, int32 ``[chunks, 2]``, on the documents' device.

    The host knows the lengths; a kernel that derives the indices from ``cu_seqlens`` makes it wait for the device.

    Args:
        documents: the documents of the batch.
        size: number of positions of a chunk; the last one of a document may be shorter.
    """
    num_chunks = torch.tensor([-(-length // size) for length in documents.lengths])  # [documents], rounded up
    document_of_chunk = torch.arange(len(num_chunks)).repeat_interleave(num_chunks)  # [chunks]
    first_chunks = num_chunks.cumsum(0) - num_chunks  # [documents]
    numbers = torch.arange(len(document_of_chunk)) - first_chunks[document_of_chunk]
    indices = torch.stack([document_of_chunk, numbers], dim=1).to(torch.int32)  # [chunks, 2]
    return _send(indices, documents.cu_seqlens.device)


def separate(documents: Documents, gap: int) -> SeparatedRow:
    """Give every position of a batch a place in one row, with ``gap`` places between documents."""
    lengths = torch.tensor(documents.lengths)
    gaps_before = gap * torch.arange(len(lengths)).repeat_interleave(lengths, output_size=documents.num_tokens)
    index = torch.arange(documents.num_tokens) + gaps_before
    length = documents.num_tokens + gap * (len(lengths) - 1)
    return SeparatedRow(_send(index, documents.cu_seqlens.device), length, gap)


def _send(indices: Tensor, device: torch.device) -> Tensor:
    """Copy indices from the host to the device, for which the host does not wait."""
    if device.type != "cuda":
        return indices.to(device)
    return indices.pin_memory().to(device, non_blocking=True)


def check_coverage(num_covered: int, num_positions: int) -> None:
    """Raise ``ValueError`` unless the documents cover as many positions as the batch has."""
    if num_covered != num_positions:
        raise ValueError(
            f"The documents cover {num_covered} positions, the batch has {num_positions}: their lengths must add up to "
            "the positions of all rows."
        )


class _Gather(torch.autograd.Function):
    """``index_select`` of rows; the gradients of a row selected several times are summed in float32 or wider."""

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = x.shape[0]
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        compute = torch.promote_types(grad.dtype, torch.float32)
        sums = torch.zeros(ctx.rows, *grad.shape[1:], dtype=compute, device=grad.device)
        sums.index_add_(0, index, grad.to(compute))
        return sums.to(grad.dtype), None


def prepend_shared_prefix(shared: SharedPrefixes | None, keys: Tensor) -> Tensor:
    """Insert the shared prefix before each document's keys or values: ``[t, n_kv, h]`` to ``[k, n_kv, h]``."""
    if shared is None:
        return keys
    return _Gather.apply(keys, shared.keys)


_Tensors = tuple[Tensor, ...]


def _split_by_length(
    cu_seqlens: Tensor, cu_keys: Tensor | None, query_tensors: _Tensors, key_tensors: _Tensors
) -> Iterator[tuple[_Tensors, _Tensors]]:
    """Yield views of the documents, for each run of consecutive documents with equal numbers of queries and of keys.

    Args:
        cu_seqlens: cumulative numbers of queries; the host waits for them.
        cu_keys: cumulative numbers of keys, by default of queries.
        query_tensors: tensors ``[t, …]`` by query.
        key_tensors: tensors ``[k, …]`` by key.

    Yields:
        Views ``[count, length, …]`` of the tensors by query, and of those by key. A kernel computes the documents of a
        run in one call, and writes outputs through the views.
    """
    query_lengths = cu_seqlens.diff().tolist()
    key_lengths = query_lengths
    if cu_keys is not None:
        key_lengths = cu_keys.diff().tolist()
    check_coverage(sum(query_lengths), query_tensors[0].shape[0])
    check_coverage(sum(key_lengths), key_tensors[0].shape[0])
    counts = []  # documents of each run
    run_query_lengths = []
    run_key_lengths = []
    lengths_of_documents = zip(query_lengths, key_lengths, strict=True)
    for (query_length, key_length), run in groupby(lengths_of_documents):
        counts.append(len(list(run)))
        run_query_lengths.append(query_length)
        run_key_lengths.append(key_length)
    query_views = [_split_runs(tensor, counts, run_query_lengths) for tensor in query_tensors]
    key_views = [_split_runs(tensor, counts, run_key_lengths) for tensor in key_tensors]
    # From the runs of each tensor to the tensors of each run.
    query_runs = zip(*query_views, strict=True)
    key_runs = zip(*key_views, strict=True)
    return zip(query_runs, key_runs, strict=True)


def _split_runs(tensor: Tensor, counts: list[int], lengths: list[int]) -> list[Tensor]:
    """Split ``[t, …]`` into a view ``[count, length, …]`` for each run."""
    shapes = list(zip(counts, lengths, strict=True))
    runs = tensor.split([count * length for count, length in shapes])  # slices would have a gradient of the whole size
    return [run.unflatten(0, shape) for run, shape in zip(runs, shapes, strict=True)]


def _empty_lse(q: Tensor) -> Tensor:
    """Empty logarithms of sums of exponentials for queries ``[t, n, h]``: ``[t, n]``, float32 or wider."""
    compute = torch.promote_types(q.dtype, torch.float32)
    return torch.empty(q.shape[:2], dtype=compute, device=q.device)


# Up to this many keys, plain products are faster than the backward pass of torch's fused kernel in bfloat16, which
# multiplies 16 to 60 GFLOP/s of the 460 that a core of a Zen 5 reaches. On such a core, blocks take about half as long
# for 64 or 128 tokens with 9 heads of 64 channels, and as long from 236 on. With 16 heads of 128 channels they take 0.7
# to 0.8 times as long for 384 or 512, and as long from 1,024 on. With AMX, the fused kernel is faster (measured with
# 512 tokens); CPUs of other kinds were not measured.
_SHORT = 512


def _needs_blocks(q: Tensor, k: Tensor, window: int, softcap: float, sinks: Tensor | None) -> bool:
    """Whether torch's fused kernel cannot compute documents ``[count, length, …]``."""
    is_plain = not window and not softcap and sinks is None and q.shape[1] == k.shape[1]
    return not is_plain or q.device.type != "cpu"


@torch.library.custom_op("torchtune::document_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    sinks: Tensor | None,
    window: int,
    softcap: float,
    cu_keys: Tensor | None,
) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q)
    lse = _empty_lse(q)  # for the backward pass of the fused kernel; blocks need none and leave it empty
    runs = _split_by_length(cu_seqlens, cu_keys, (q, out, lse), (k, v))
    for (q_run, out_run, lse_run), (k_run, v_run) in runs:
        run_window = window if window < k_run.shape[1] else 0  # a window of all keys is none
        if _needs_blocks(q_run, k_run, run_window, softcap, sinks):
            block_attention(q_run, k_run, v_run, out_run, run_window, softcap, sinks)
        else:
            heads = [tensor.transpose(1, 2) for tensor in (q_run, k_run, v_run)]  # [count, n or n_kv, length, h]
            attended, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *heads, dropout_p=0.0, is_causal=True
            )
            out_run.copy_(attended.transpose(1, 2))
            lse_run.copy_(log_sums.transpose(1, 2))
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
    sinks: Tensor | None,
    window: int,
    softcap: float,
    cu_keys: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys, values and sinks; those of the sinks are zero if there are none."""
    # Every position is in a document, whose run writes its gradients.
    grad_q = torch.empty_like(q)
    grad_k = torch.empty_like(k)
    grad_v = torch.empty_like(v)
    grad_sinks = torch.zeros(q.shape[1], dtype=torch.float32, device=q.device)
    runs = _split_by_length(cu_seqlens, cu_keys, (grad, q, out, lse, grad_q), (k, v, grad_k, grad_v))
    for query_tensors, key_tensors in runs:
        grad_run, q_run, out_run, lse_run, grad_q_run = query_tensors
        k_run, v_run, grad_k_run, grad_v_run = key_tensors
        run_window = window if window < k_run.shape[1] else 0  # a window of all keys is none
        # For short documents in bfloat16, torch's backward pass is slower than blocks, except with AMX; see _SHORT.
        is_short = q_run.dtype == torch.bfloat16 and q_run.shape[1] <= _SHORT
        is_faster_in_blocks = is_short and has_bfloat16_vectors_only()
        if is_faster_in_blocks or _needs_blocks(q_run, k_run, run_window, softcap, sinks):
            block_attention_backward(
                grad_run,
                q_run,
                k_run,
                v_run,
                grad_q_run,
                grad_k_run,
                grad_v_run,
                run_window,
                softcap,
                sinks=sinks,
                grad_sinks=None if sinks is None else grad_sinks,
            )
            continue
        saved = (grad_run, q_run, k_run, v_run, out_run, lse_run)
        heads = [tensor.transpose(1, 2) for tensor in saved]  # [count, n or n_kv, length, h], and [count, n, length]
        run_grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *heads, dropout_p=0.0, is_causal=True
        )
        for result, run_grad in zip((grad_q_run, grad_k_run, grad_v_run), run_grads, strict=True):
            result.copy_(run_grad.transpose(1, 2))
    return grad_q, grad_k, grad_v, grad_sinks


@_forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    sinks: Tensor | None,
    window: int,
    softcap: float,
    cu_keys: Tensor | None,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), _empty_lse(q)


@_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    sinks: Tensor | None,
    window: int,
    softcap: float,
    cu_keys: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_sinks = torch.empty(q.shape[1], dtype=torch.float32, device=q.device)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), grad_sinks


def _setup_context(ctx, inputs: tuple[Tensor | int | float | None, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.window, ctx.softcap, cu_keys = inputs
    ctx.save_for_backward(*tensors, cu_keys, *output)


def _backward_formula(ctx, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, cu_seqlens, sinks, cu_keys, out, lse = ctx.saved_tensors
    grad_q, grad_k, grad_v, grad_sinks = _backward(
        grad, q, k, v, out, lse, cu_seqlens, sinks, ctx.window, ctx.softcap, cu_keys
    )
    if sinks is None:
        grad_sinks = None  # zeros, because an operator always returns a tensor
    else:
        grad_sinks = grad_sinks.to(sinks.dtype)
    # In the order of the arguments: boundaries, window, soft cap and boundaries of keys have no gradient.
    return grad_q, grad_k, grad_v, None, grad_sinks, None, None, None


_forward.register_autograd(_backward_formula, setup_context=_setup_context)


def document_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    cu_keys: Tensor | None = None,
) -> Tensor:
    """Compute causal attention within each document.

    Args:
        q: queries ``[t, n, h]``, packed documents.
        k: keys ``[t, n_kv, h]``.
        v: values ``[t, n_kv, h]``.
        cu_seqlens: int32 ``[documents + 1]``, cumulative sequence lengths, from 0 to t.
        window: sliding window in positions, the query's own included; 0: none.
        softcap: soft cap of the scores; 0: none.
        sinks: attention sinks ``[n]``: a logit per head in the softmax's denominator.
        cu_keys: int32 ``[documents + 1]``, cumulative numbers of keys, for documents with more keys than queries
            (:func:`prepend_shared_prefix`); the queries are then the last positions.

    Returns:
        Tensor ``[t, n, h]``.

    Raises:
        ValueError: the documents do not cover the positions.
    """
    # Autocast may have left keys and values in another dtype.
    k = k.to(q.dtype)
    v = v.to(q.dtype)
    out, _ = _forward(q, k, v, cu_seqlens, sinks, window, softcap, cu_keys)
    return out


def attention_by_document(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, dropout_p: float, is_causal: bool
) -> Tensor:
    """Compute :func:`document_attention` with dropout of attention weights, or attention that is not causal.

    Args:
        q: queries ``[t, n, h]``, packed documents.
        k: keys ``[t, n_kv, h]``.
        v: values ``[t, n_kv, h]``.
        cu_seqlens: int32 ``[documents + 1]``, cumulative sequence lengths, from 0 to t.
        dropout_p: dropout probability of attention weights.
        is_causal: whether attention is causal.

    Returns:
        Tensor ``[t, n, h]``.
    """
    outputs = []
    runs = _split_by_length(cu_seqlens, None, (q,), (k, v))
    for (q_run,), (k_run, v_run) in runs:  # [count, length, n or n_kv, h]
        attended = F.scaled_dot_product_attention(
            q_run.transpose(1, 2),
            k_run.transpose(1, 2),
            v_run.transpose(1, 2),
            dropout_p=dropout_p,
            is_causal=is_causal,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        outputs.append(attended.transpose(1, 2).flatten(0, 1))  # [count * length, n, h]
    return torch.cat(outputs)


# Causal attention on the CPU, block by block over the queries. It serves cases that torch's fused CPU kernel lacks:
# windows, soft caps, sinks, and more keys than queries; and for the backward pass of short documents in bfloat16, which
# that kernel computes slowly. Scores and probabilities are float32; as in that kernel, normalized probabilities are
# rounded to the dtype of the values. Only queries, keys and values are saved; the backward pass recomputes the others.

_BLOCK = 128  # queries at a time; measured best from 32 to 192


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    window: int,
    softcap: float,
    sinks: Tensor | None,
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
    num_kv_heads = k.shape[2]
    queries = _split_queries(q, num_kv_heads)  # [b, n_kv, n / n_kv, s, h]
    out_heads = _split_queries(out, num_kv_heads)
    keys = _by_kv_head(k, torch.float32)  # [b * n_kv, t, h]; scores are computed in float32
    values = _by_kv_head(v, v.dtype)
    for block in _iter_blocks(queries, keys, window, softcap, sinks):
        block_values = values[:, block.key_range]
        product = torch.bmm(block.weights.to(v.dtype), block_values)  # [b * n_kv, n / n_kv * block, h]
        out_block = out_heads[:, :, :, block.query_range]
        out_block.copy_(product.view(out_block.shape))


def block_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    grad_sinks: Tensor | None,
) -> None:
    """Run the backward pass of :func:`block_attention`.

    Args:
        grad: gradient of the output ``[b, s, n, h]``.
        q: queries ``[b, s, n, h]``.
        k: keys ``[b, t, n_kv, h]``.
        v: values ``[b, t, n_kv, h]``.
        grad_q: receives the gradient of the queries.
        grad_k: receives the gradient of the keys.
        grad_v: receives the gradient of the values.
        window: as in the forward pass.
        softcap: as in the forward pass.
        sinks: as in the forward pass.
        grad_sinks: float32 ``[n]``, to which the gradient of the sinks is added; None: it is not computed.
    """
    num_kv_heads = k.shape[2]
    queries = _split_queries(q, num_kv_heads)  # [b, n_kv, n / n_kv, s, h]
    grad_heads = _split_queries(grad, num_kv_heads)
    grad_queries = _split_queries(grad_q, num_kv_heads)
    keys = _by_kv_head(k, k.dtype)  # [b * n_kv, t, h]
    values = _by_kv_head(v, v.dtype)
    # float32 sums over blocks of queries.
    grad_keys = torch.zeros(keys.shape, dtype=torch.float32, device=k.device)
    grad_values = torch.zeros(keys.shape, dtype=torch.float32, device=k.device)
    # The probabilities are computed again, in float32; products with them are in the dtype of the inputs.
    for block in _iter_blocks(queries, keys.float(), window, softcap, sinks):
        key_range = block.key_range
        weights = block.weights  # [b * n_kv, n / n_kv * block, keys of the block]
        block_grad = _take_block(grad_heads, block.query_range, grad.dtype)  # [b * n_kv, n / n_kv * block, h]
        grad_values[:, key_range] += torch.bmm(weights.to(v.dtype).transpose(1, 2), block_grad)
        grad_weights = torch.bmm(block_grad, values[:, key_range].transpose(1, 2)).float()
        # Also right with a sink, whose weight `weights` lacks: a sink has no value, so that its weight has no gradient.
        grad_scores = torch.ops.aten._softmax_backward_data(grad_weights, weights, -1, torch.float32)
        if grad_sinks is not None:
            # The sink's probability is 1 - the sum of the others, and its value is zero.
            grad_sink = (weights.sum(-1) - 1) * (grad_weights * weights).sum(-1)
            grad_sink_heads = grad_sink.view(q.shape[0], grad_sinks.shape[0], -1)  # [b, n, block]
            grad_sinks += grad_sink_heads.sum((0, 2))
        if block.slope is not None:
            grad_scores.mul_(block.slope)
        # Scores are scaled products, so that this is the gradient of the products.
        grad_scores = grad_scores.mul_(q.shape[-1] ** -0.5).to(q.dtype)
        product = torch.bmm(grad_scores, keys[:, key_range])  # [b * n_kv, n / n_kv * block, h]
        grad_queries_block = grad_queries[:, :, :, block.query_range]
        grad_queries_block.copy_(product.view(grad_queries_block.shape))
        grad_keys[:, key_range] += torch.bmm(grad_scores.transpose(1, 2), block.queries.to(q.dtype))
    by_row = (k.shape[0], num_kv_heads)
    grad_k.copy_(grad_keys.unflatten(0, by_row).transpose(1, 2))  # [b * n_kv, t, h] -> [b, t, n_kv, h]
    grad_v.copy_(grad_values.unflatten(0, by_row).transpose(1, 2))


def _split_queries(x: Tensor, num_kv_heads: int) -> Tensor:
    """``[b, s, n, h]`` as a view ``[b, n_kv, n / n_kv, s, h]``."""
    return x.unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4)


def _by_kv_head(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values ``[b, s, n_kv, h]`` as ``[b * n_kv, s, h]`` of ``dtype``."""
    heads = x.transpose(1, 2)  # [b, n_kv, s, h]
    return heads.to(dtype, memory_format=torch.contiguous_format).flatten(0, 1)


def _take_block(x: Tensor, block: slice, dtype: torch.dtype) -> Tensor:
    """A block of positions of ``[b, n_kv, n / n_kv, s, h]`` as ``[b * n_kv, n / n_kv * block, h]`` of ``dtype``."""
    heads = x[:, :, :, block]  # [b, n_kv, n / n_kv, block, h]
    heads = heads.to(dtype, memory_format=torch.contiguous_format)
    return heads.flatten(2, 3).flatten(0, 1)


@functools.cache
def _causal_mask(device: torch.device) -> Tensor:
    """Return the causal mask of a diagonal block: -inf above the diagonal, float32 ``[_BLOCK, _BLOCK]``."""
    return torch.full((_BLOCK, _BLOCK), float("-inf"), device=device).triu(1)


class _QueryBlock(NamedTuple):
    """A block of queries with its probabilities, all float32.

    Attributes:
        query_range: positions of the block among the queries.
        key_range: positions of the keys that the block sees.
        queries: ``[b * n_kv, n / n_kv * block, h]``.
        weights: probabilities ``[b * n_kv, n / n_kv * block, keys of the block]``.
        slope: derivative of the soft cap, of the shape of the weights; None without a soft cap.
    """

    query_range: slice
    key_range: slice
    queries: Tensor
    weights: Tensor
    slope: Tensor | None


def _iter_blocks(
    queries: Tensor, keys: Tensor, window: int, softcap: float, sinks: Tensor | None
) -> Iterator[_QueryBlock]:
    """Compute the probabilities of one block of queries after another, in float32.

    Args:
        queries: ``[b, n_kv, n / n_kv, s, h]``.
        keys: float32 ``[b * n_kv, t, h]``.
        window: sliding window in positions; 0: none.
        softcap: soft cap of the scores; 0: none.
        sinks: attention sinks ``[n]``.
    """
    group, s, h = queries.shape[2:]
    num_earlier = keys.shape[1] - s  # positions with keys and without queries
    future = _causal_mask(queries.device)
    scaled_keys = keys * h**-0.5  # once, instead of the scores of every block
    for start in range(0, s, _BLOCK):
        query_range = slice(start, min(start + _BLOCK, s))
        size = query_range.stop - start
        first_position = start + num_earlier  # of the block's first query, among the keys
        first_key = 0
        if window:
            first_key = max(0, first_position - window + 1)
        key_range = slice(first_key, first_position + size)
        block_queries = _take_block(queries, query_range, torch.float32)
        scores = torch.bmm(block_queries, scaled_keys[:, key_range].transpose(1, 2))
        slope = None
        if softcap:
            bounded = scores.div_(softcap).tanh_()
            slope = 1 - bounded.square()  # of tanh, for the backward pass
            scores = bounded * softcap
        # A view [b * n_kv, n / n_kv, block, keys of the block]: masks are the same for all heads of a group.
        position_scores = scores.unflatten(1, (group, size))
        diagonal = first_position - first_key  # the first column whose position is in the block itself
        position_scores[..., diagonal:] += future[:size, :size]
        if window:
            query_positions = torch.arange(first_position, first_position + size, device=keys.device)
            key_positions = torch.arange(key_range.start, key_range.stop, device=keys.device)
            distance = query_positions[:, None] - key_positions  # [block, keys of the block]
            position_scores.masked_fill_(distance >= window, float("-inf"))
        if sinks is None:
            weights = scores.softmax(-1)
        else:
            # One more score per query; its probability is left out, because the sink has no value.
            by_kv_head = sinks.float().view(-1, group, 1)  # [n_kv, n / n_kv, 1]
            sink_scores = by_kv_head.repeat(queries.shape[0], 1, size)  # [b * n_kv, n / n_kv, block]
            sink_scores = sink_scores.view(*scores.shape[:2], 1)
            weights_with_sink = torch.cat([scores, sink_scores], -1).softmax(-1)
            weights = weights_with_sink[..., :-1]
        yield _QueryBlock(query_range, key_range, block_queries, weights, slope)
