"""Chunked linear attention with a decaying state: the common part of the gated delta rule and Mamba 2."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

CHUNK = 64

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
        shared = k.shape[2]
        self.q, self.k = (t.float().transpose(1, 2)[:, :, None] for t in (q, k))
        self.v = _heads_first(v, shared)
        g, beta = (t.float().unflatten(2, (shared, -1)).permute(0, 2, 3, 1) for t in (g, beta))
        self.beta = beta[..., None]

        document = resets.cumsum(-1)  # index within the chunk; 0: the document of the incoming state
        same = (document[:, :, None] == document[:, None, :]).tril()[:, None, None]
        first = (document == 0)[:, None, None]
        last = (document == document[:, -1:])[:, None, None]
        # float64, because small differences of a large cumulative sum have only about three digits in float32.
        total = g.cumsum(-1, dtype=torch.float64)
        between = (total[..., :, None] - total[..., None, :]).float()
        nothing = float("-inf")
        self.decay = torch.where(same, between, nothing).exp_()
        self.since_state = torch.where(first, total.float(), nothing).exp_()[..., None]
        self.until_end = torch.where(last, between[..., -1, :], nothing).exp_()[..., None]

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

    def d_g(self, d_decay: Tensor, since: Tensor, until: Tensor) -> Tensor:
        """Compute the gradient of g, ``[b, c, n_v]``.

        Args:
            d_decay: gradient of the logarithm of ``decay``, ``[b, n_k, r, c, c]``.
            since: gradient of the logarithm of ``since_state``, ``[b, n_k, r, c]``.
            until: gradient of the logarithm of ``until_end``, ``[b, n_k, r, c]``.
        """
        d_total = d_decay.sum(-1) - d_decay.sum(-2) + since - until
        d_total[..., -1] += until.sum(-1)
        return scalars_first(d_total.flip(-1).cumsum(-1).flip(-1))


def positions_first(x: Tensor) -> Tensor:
    """Permute ``[b, n_k, r, c, h_v]`` to ``[b, c, n_v, h_v]``."""
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3)


def scalars_first(x: Tensor) -> Tensor:
    """Permute ``[b, n_k, r, c]`` to ``[b, c, n_v]``."""
    return x.permute(0, 3, 1, 2).flatten(2)


def _heads_first(x: Tensor, shared: int) -> Tensor:
    """Permute ``[b, c, n_v, h_v]`` to float32 ``[b, n_k, r, c, h_v]``."""
    return x.float().unflatten(2, (shared, -1)).permute(0, 2, 3, 1, 4)


def _slices(positions: int) -> Iterator[slice]:
    for start in range(0, positions, CHUNK):
        yield slice(start, min(start + CHUNK, positions))


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

    @torch.library.custom_op(f"torchtune::{name}", mutates_args=())
    def forward(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, resets: Tensor, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        first = first_state(k, v) if state is None else state.float()
        states = first.new_empty(-(-k.shape[1] // CHUNK) + 1, *first.shape)
        states[0] = first
        for index, where in enumerate(_slices(k.shape[1])):
            chunk = kind(*(t[:, where] for t in (q, k, v, g, beta, resets)))
            found, states[index + 1] = chunk.read(states[index])
            out[:, where] = positions_first(found)
        return out, states

    @torch.library.custom_op(f"torchtune::{name}_backward", mutates_args=())
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, resets: Tensor, states: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        grads = tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v, g, beta))
        d_state = torch.zeros_like(states[0])
        for index, where in reversed(list(enumerate(_slices(k.shape[1])))):
            chunk = kind(*(t[:, where] for t in (q, k, v, g, beta, resets)))
            *values, d_state = chunk.gradients(states[index], _heads_first(grad[:, where], k.shape[2]), d_state)
            for result, value in zip(grads, values, strict=True):
                result[:, where] = value
        return grads

    @forward.register_fake
    def _(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, resets: Tensor, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        first = first_state(k, v)
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        return out, first.new_empty(-(-k.shape[1] // CHUNK) + 1, *first.shape)

    @backward.register_fake
    def _(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, resets: Tensor, states: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v, g, beta))

    def setup_context(ctx, inputs: tuple[Tensor | None, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs[:6], output[1])
        ctx.mark_non_differentiable(output[1])

    def formula(ctx, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        return *backward(grad, *ctx.saved_tensors), None, None

    forward.register_autograd(formula, setup_context=setup_context)

    def rule(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, resets: Tensor, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if k.shape[1] == 1 and state is not None and not torch.is_grad_enabled():
            out, state = kind(q, k, v, g, beta, resets).step(state)
            return positions_first(out).to(v.dtype), state
        out, states = forward(q, k, v, g, beta, resets, state)
        return out, states[-1]

    return rule
