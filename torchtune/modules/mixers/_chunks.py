"""Chunked linear attention with a decaying state: the common part of the gated delta rule and Mamba 2."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

CHUNK = 64  # positions; the state before each chunk is saved for the backward pass

Rule = Callable[..., tuple[Tensor, Tensor]]


class Chunk(ABC):
    """Base class of a chunk of c positions, for all heads, in float32.

    ``d(i, j) = exp(g_{j+1} + ... + g_i)`` is the decay between positions i >= j of one document.

    Args:
        q: ``[b, c, n_k, h_k]``.
        k: ``[b, c, n_k, h_k]``.
        v: ``[b, c, n_v, h_v]``.
        g: logarithm of the decay ``[b, c, n_v]``.
        beta: write strength ``[b, c, n_v]``.
        resets: bool ``[b, c]``, True at the first positions of documents.

    Attributes:
        q: queries ``[b, n_k, 1, c, h_k]``.
        k: keys ``[b, n_k, 1, c, h_k]``.
        v: values ``[b, n_k, r, c, h_v]``; r value heads share a key head.
        beta: write strength ``[b, n_k, r, c, 1]``.
        decay: d ``[b, n_k, r, c, c]``, 0 above the diagonal and between documents.
        since_state: decay of the incoming state ``[b, n_k, r, c, 1]``, 0 after a new document has begun.
        until_end: decay until the last position ``[b, n_k, r, c, 1]``, 0 in documents that end before it.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, resets: Tensor) -> None:
        key_heads = k.shape[2]
        self.q = q.float().transpose(1, 2)[:, :, None]
        self.k = k.float().transpose(1, 2)[:, :, None]
        self.v = _heads_first(v, key_heads)
        self.beta = _scalars_heads_first(beta, key_heads)[..., None]
        log_decays = _scalars_heads_first(g, key_heads)  # [b, n_k, r, c]

        document = resets.cumsum(-1)  # [b, c], index within the chunk; 0: the document of the incoming state
        is_same_document = (document[:, :, None] == document[:, None, :]).tril()[:, None, None]
        is_in_first_document = (document == 0)[:, None, None]
        is_in_last_document = (document == document[:, -1:])[:, None, None]
        # float64, because small differences of a large cumulative sum have only about three digits in float32.
        cumulative = log_decays.cumsum(-1, dtype=torch.float64)
        between = (cumulative[..., :, None] - cumulative[..., None, :]).float()  # [b, n_k, r, c, c]
        # The logarithm of no decay at all: positions of other documents are not seen.
        closed = float("-inf")
        self.decay = torch.where(is_same_document, between, closed).exp_()
        self.since_state = torch.where(is_in_first_document, cumulative.float(), closed).exp_()[..., None]
        self.until_end = torch.where(is_in_last_document, between[..., -1, :], closed).exp_()[..., None]

    @staticmethod
    @abstractmethod
    def state_shape(k: Tensor, v: Tensor) -> tuple[int, ...]:
        """Return the shape of the state for keys ``[b, s, n_k, h_k]`` and values ``[b, s, n_v, h_v]``."""

    @abstractmethod
    def read(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the outputs ``[b, n_k, r, c, h_v]`` and the state after the chunk."""

    @abstractmethod
    def step(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Compute :meth:`read` for a single position, by the recurrence."""

    @abstractmethod
    def gradients(self, state: Tensor, d_out: Tensor, d_after: Tensor) -> tuple[Tensor, ...]:
        """Compute the gradients of the arguments q, k, v, g and beta, and of the state before the chunk."""

    def d_g(self, d_log_decay: Tensor, d_log_since: Tensor, d_log_until: Tensor) -> Tensor:
        """Compute the gradient of g, ``[b, c, n_v]``.

        Args:
            d_log_decay: gradient of the logarithm of ``decay``, ``[b, n_k, r, c, c]``.
            d_log_since: gradient of the logarithm of ``since_state``, ``[b, n_k, r, c]``.
            d_log_until: gradient of the logarithm of ``until_end``, ``[b, n_k, r, c]``.
        """
        # Of the cumulative sums G: log decay(i, j) is G_i - G_j, log since_state G_i, log until_end G_c - G_j.
        d_cumulative = d_log_decay.sum(-1) - d_log_decay.sum(-2) + d_log_since - d_log_until
        d_cumulative[..., -1] += d_log_until.sum(-1)
        # g_i is part of G_i and of all later sums.
        return scalars_first(d_cumulative.flip(-1).cumsum(-1).flip(-1))


def positions_first(x: Tensor) -> Tensor:
    """Permute ``[b, n_k, r, c, h_v]`` to ``[b, c, n_v, h_v]``."""
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3)


def scalars_first(x: Tensor) -> Tensor:
    """Permute ``[b, n_k, r, c]`` to ``[b, c, n_v]``."""
    return x.permute(0, 3, 1, 2).flatten(2)


def _heads_first(x: Tensor, key_heads: int) -> Tensor:
    """Permute ``[b, c, n_v, h_v]`` to float32 ``[b, n_k, r, c, h_v]``."""
    return x.float().unflatten(2, (key_heads, -1)).permute(0, 2, 3, 1, 4)


def _scalars_heads_first(x: Tensor, key_heads: int) -> Tensor:
    """Permute ``[b, c, n_v]`` to float32 ``[b, n_k, r, c]``."""
    return x.float().unflatten(2, (key_heads, -1)).permute(0, 2, 3, 1)


def _num_chunks(k: Tensor) -> int:
    return -(-k.shape[1] // CHUNK)  # rounded up


def _slices(num_positions: int) -> Iterator[slice]:
    for start in range(0, num_positions, CHUNK):
        yield slice(start, min(start + CHUNK, num_positions))


def chunked(name: str, kind: type[Chunk]) -> Rule:
    """Make the function of a chunked recurrence, and its operator ``torchtune::name``.

    For the backward pass, it saves only the inputs and the state at the beginning of each chunk.

    Args:
        name: name of the operator.
        kind: class that computes a chunk.

    Returns:
        ``rule(q, k, v, g, beta, resets, state=None)``, which returns the outputs ``[b, s, n_v, h_v]`` in the dtype of
        ``v`` and the state after the last position, float32 and without a gradient.
    """

    def first_state(k: Tensor, v: Tensor) -> Tensor:
        return k.new_zeros(kind.state_shape(k, v), dtype=torch.float32)

    def make_chunk(positions: slice, *inputs: Tensor) -> Chunk:
        return kind(*(tensor[:, positions] for tensor in inputs))

    def empty_gradients(*inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in inputs)

    @torch.library.custom_op(f"torchtune::{name}", mutates_args=())
    def forward(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, resets: Tensor, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        first = first_state(k, v) if state is None else state.float()
        states = first.new_empty(_num_chunks(k) + 1, *first.shape)  # before each chunk, and after the last one
        states[0] = first
        for index, positions in enumerate(_slices(k.shape[1])):
            chunk = make_chunk(positions, q, k, v, g, beta, resets)
            chunk_out, state_after = chunk.read(states[index])
            states[index + 1] = state_after
            out[:, positions] = positions_first(chunk_out)
        return out, states

    @torch.library.custom_op(f"torchtune::{name}_backward", mutates_args=())
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, resets: Tensor, states: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        grads = empty_gradients(q, k, v, g, beta)
        d_state = torch.zeros_like(states[0])  # the state after the last position has no gradient
        for index, positions in reversed(list(enumerate(_slices(k.shape[1])))):
            chunk = make_chunk(positions, q, k, v, g, beta, resets)
            d_out = _heads_first(grad[:, positions], k.shape[2])
            *chunk_grads, d_state = chunk.gradients(states[index], d_out, d_state)
            for grad_of_input, chunk_grad in zip(grads, chunk_grads, strict=True):
                grad_of_input[:, positions] = chunk_grad
        return grads

    @forward.register_fake
    def _(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, resets: Tensor, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        first = first_state(k, v)
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        return out, first.new_empty(_num_chunks(k) + 1, *first.shape)

    @backward.register_fake
    def _(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, resets: Tensor, states: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return empty_gradients(q, k, v, g, beta)

    def setup_context(ctx, inputs: tuple[Tensor | None, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, _ = inputs  # without the state before the first position
        _, states = output
        ctx.save_for_backward(*tensors, states)
        ctx.mark_non_differentiable(states)

    def formula(ctx, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        # Neither `resets` nor the state before the first position has a gradient.
        return *backward(grad, *ctx.saved_tensors), None, None

    forward.register_autograd(formula, setup_context=setup_context)

    def rule(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, resets: Tensor, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        is_decoding = k.shape[1] == 1 and state is not None and not torch.is_grad_enabled()
        if is_decoding:
            out, state = kind(q, k, v, g, beta, resets).step(state)
            return positions_first(out).to(v.dtype), state
        out, states = forward(q, k, v, g, beta, resets, state)
        return out, states[-1]

    return rule
