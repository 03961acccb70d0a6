"""Document-masked attention with sinks on CUDA: torch's flash attention kernel as a custom operator."""

import torch
from torch import Tensor

from torchtune.modules._sinks import add_sinks, sinks_gradient


def _window(window: int) -> dict[str, int]:
    return {"window_size_left": window - 1 if window else -1, "window_size_right": 0}


@torch.library.custom_op("torchtune::flash_attention_with_sinks", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    sinks: Tensor,
    cu_keys: Tensor | None,
    max_length: int,
    window: int,
) -> tuple[Tensor, Tensor]:
    of_keys = cu_seqlens if cu_keys is None else cu_keys
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seqlens, of_keys, max_length, max_length, 0.0, not window, False, **_window(window)
    )
    out, lse = add_sinks(out.transpose(0, 1), lse, sinks)
    return out.transpose(0, 1).contiguous(), lse


@torch.library.custom_op("torchtune::flash_attention_with_sinks_backward", mutates_args=())
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    sinks: Tensor,
    cu_keys: Tensor | None,
    out: Tensor,
    lse: Tensor,
    max_length: int,
    window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    unused = torch.empty(0, device=q.device)
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # RNG state; unused without dropout
    lengths = (cu_seqlens, cu_seqlens if cu_keys is None else cu_keys, max_length, max_length)
    grads = torch.ops.aten._flash_attention_backward(
        grad.contiguous(), q, k, v, out, lse, *lengths, 0.0, not window, state, unused, **_window(window)
    )
    return *grads, sinks_gradient(grad.transpose(0, 1), out.transpose(0, 1), lse, sinks)


@_forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    sinks: Tensor,
    cu_keys: Tensor | None,
    max_length: int,
    window: int,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)


@_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    sinks: Tensor,
    cu_keys: Tensor | None,
    out: Tensor,
    lse: Tensor,
    max_length: int,
    window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_sinks = torch.empty(q.shape[1], dtype=torch.float32, device=q.device)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), grad_sinks


def _setup_context(ctx, inputs: tuple[Tensor | int, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.max_length, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _backward_formula(ctx, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # read once: activation checkpointing frees them
    *grads, grad_sinks = _backward(grad, *saved, ctx.max_length, ctx.window)
    return *grads, None, grad_sinks.to(saved[4].dtype), None, None, None


_forward.register_autograd(_backward_formula, setup_context=_setup_context)


def flash_attention_with_sinks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_length: int,
    sinks: Tensor,
    window: int = 0,
    cu_keys: Tensor | None = None,
) -> Tensor:
    """Compute causal attention within each document, on CUDA in float16 or bfloat16, without a host sync.

    Args:
        q: queries ``[t, n, h]``, packed documents.
        k: keys ``[t, n_kv, h]``.
        v: values ``[t, n_kv, h]``.
        cu_seqlens: int32 ``[documents + 1]``, cumulative sequence lengths, from 0 to t.
        max_length: upper bound of a document's number of keys.
        sinks: attention sinks ``[n]``.
        window: sliding window in positions, the query's own included; 0: none.
        cu_keys: int32 ``[documents + 1]``, cumulative numbers of keys, for documents with more keys than queries; the
            queries are then the last positions.

    Returns:
        Tensor ``[t, n, h]``.
    """
    return _forward(q, k, v, cu_seqlens, sinks, cu_keys, max_length, window)[0]
