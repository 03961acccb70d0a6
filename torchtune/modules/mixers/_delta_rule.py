"""The gated delta rule: linear attention with a state that decays and corrects itself, chunk by chunk."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 64


@dataclass
class _Chunk:
    """c positions of all heads, in float32.

    With the decay ``d(i, j) = exp(g_{j+1} + ... + g_i)`` between positions i >= j of one document, the correction that
    position i writes is ``u_i = beta_i (v_i - exp(g_1 + ... + g_i) S^T k_i - sum_{j<i} d(i, j) (k_i . k_j) u_j)``: a
    triangular system for all of them at once (Yang et al. 2024, arXiv:2412.06464).

    Attributes:
        q: scaled queries of length ``h_k ** -0.5``, ``[b, n_k, 1, c, h_k]``.
        k: keys of length 1, ``[b, n_k, 1, c, h_k]``.
        v: values ``[b, n_k, r, c, h_v]``; r value heads share a key head.
        beta: ``[b, n_k, r, c, 1]``.
        decay: d ``[b, n_k, r, c, c]``, 0 above the diagonal and between documents.
        since_state: decay of the state ``[b, n_k, r, c, 1]``, 0 where a document has begun since.
        until_end: decay until the last position ``[b, n_k, r, c, 1]``, 0 for documents that have ended by then.
        q_scale: factor of the queries and of the keys, ``[b, n_k, 1, c, 1]``, that made their length so.
        k_scale: see ``q_scale``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    decay: Tensor
    since_state: Tensor
    until_end: Tensor
    q_scale: Tensor
    k_scale: Tensor

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, resets: Tensor) -> "_Chunk":
        """From slices ``[b, c, n, ...]`` of what :func:`gated_delta_rule` takes."""
        shared = k.shape[2]
        q, k = (t.float().transpose(1, 2)[:, :, None] for t in (q, k))
        q_scale, k_scale = (torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
        q_scale = q_scale * q.shape[-1] ** -0.5
        v = v.float().unflatten(2, (shared, -1)).permute(0, 2, 3, 1, 4)
        g, beta = (t.float().unflatten(2, (shared, -1)).permute(0, 2, 3, 1) for t in (g, beta))

        document = resets.cumsum(-1)  # within the chunk; 0 continues that of the state
        same = (document[:, :, None] == document[:, None, :]).tril()[:, None, None]
        first = (document == 0)[:, None, None]
        last = (document == document[:, -1:])[:, None, None]
        # Neighbours differ by little where the sum is large: float32 would leave three digits of the difference.
        total = g.cumsum(-1, dtype=torch.float64)
        between = (total[..., :, None] - total[..., None, :]).float()
        nothing = float("-inf")
        return cls(
            q=q * q_scale,
            k=k * k_scale,
            v=v,
            beta=beta[..., None],
            decay=torch.where(same, between, nothing).exp_(),
            since_state=torch.where(first, total.float(), nothing).exp_()[..., None],
            until_end=torch.where(last, between[..., -1, :], nothing).exp_()[..., None],
            q_scale=q_scale,
            k_scale=k_scale,
        )

    def corrections(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The system's matrix (strictly below its diagonal), the error ``v - S^T k``, and u ``[b, n_k, r, c, h_v]``."""
        system = (self.k @ self.k.mT) * self.decay * self.beta
        error = self.v - (self.k @ state) * self.since_state
        return system, error, torch.linalg.solve_triangular(system, self.beta * error, upper=False, unitriangular=True)

    def read(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """What the queries read ``[b, n_k, r, c, h_v]``, and the state after the chunk."""
        _, _, written = self.corrections(state)
        out = (self.q @ state) * self.since_state + ((self.q @ self.k.mT) * self.decay) @ written
        return out, state * self.since_state[..., -1:, :] + (self.k * self.until_end).mT @ written

    def gradients(self, state: Tensor, d_out: Tensor, d_after: Tensor) -> tuple[Tensor, ...]:
        """Gradients of q, k, v, g and beta, ``[b, c, n, ...]``, and of the state before the chunk."""
        q, k, beta, decay = self.q, self.k, self.beta, self.decay
        system, error, written = self.corrections(state)
        similar, scores = k @ k.mT, q @ k.mT
        from_after = written @ d_after.mT
        d_written = (scores * decay).mT @ d_out + (k * self.until_end) @ d_after
        d_target = torch.linalg.solve_triangular(system.mT, d_written, upper=True, unitriangular=True)
        d_system = (d_target @ written.mT).tril_(-1).neg_()
        d_scores = d_out @ written.mT
        d_error = beta * d_target
        d_read_k, d_read_q = -d_error * self.since_state, d_out * self.since_state
        d_decay = (d_scores * scores + d_system * similar * beta) * decay
        d_scores, d_similar = d_scores * decay, d_system * decay * beta

        d_q = (d_read_q @ state.mT + d_scores @ k).sum(2, keepdim=True)
        d_k = d_read_k @ state.mT + d_scores.mT @ q + (d_similar + d_similar.mT) @ k + self.until_end * from_after
        d_k = d_k.sum(2, keepdim=True)
        d_beta = (d_target * error).sum(-1) + (d_system * similar * decay).sum(-1)
        since = ((d_out * (q @ state) - d_error * (k @ state)) * self.since_state).sum(-1)
        since[..., -1] += self.since_state[..., -1, 0] * (d_after * state).sum((-2, -1))
        until = self.until_end[..., 0] * (k * from_after).sum(-1)
        d_total = d_decay.sum(-1) - d_decay.sum(-2) + since - until
        d_total[..., -1] += until.sum(-1)
        d_g = d_total.flip(-1).cumsum(-1).flip(-1)
        d_state = k.mT @ d_read_k + q.mT @ d_read_q + d_after * self.since_state[..., -1:, :]

        length = q.shape[-1] ** 0.5
        d_q = self.q_scale * (d_q - q * (q * d_q).sum(-1, keepdim=True) * length**2)
        d_k = self.k_scale * (d_k - k * (k * d_k).sum(-1, keepdim=True))
        d_q, d_k = (t[:, :, 0].transpose(1, 2) for t in (d_q, d_k))
        d_g, d_beta = (t.permute(0, 3, 1, 2).flatten(2) for t in (d_g, d_beta))
        return d_q, d_k, _positions_first(d_error), d_g, d_beta, d_state


def _positions_first(x: Tensor) -> Tensor:
    """``[b, n_k, r, c, h_v]`` to ``[b, c, n_v, h_v]``."""
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _heads_first(x: Tensor, shared: int) -> Tensor:
    """``[b, c, n_v, h_v]`` to float32 ``[b, n_k, r, c, h_v]``."""
    return x.float().unflatten(2, (shared, -1)).permute(0, 2, 3, 1, 4)


def _slices(positions: int) -> Iterator[slice]:
    for start in range(0, positions, CHUNK):
        yield slice(start, min(start + CHUNK, positions))


def _first_state(k: Tensor, v: Tensor) -> Tensor:
    shared = k.shape[2]
    return k.new_zeros(k.shape[0], shared, v.shape[2] // shared, k.shape[-1], v.shape[-1], dtype=torch.float32)


@torch.library.custom_op("torchtune::gated_delta_rule", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, resets: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    first = _first_state(k, v) if state is None else state.float()
    states = first.new_empty(-(-k.shape[1] // CHUNK) + 1, *first.shape)
    states[0] = first
    for index, where in enumerate(_slices(k.shape[1])):
        chunk = _Chunk.of(*(t[:, where] for t in (q, k, v, g, beta, resets)))
        found, states[index + 1] = chunk.read(states[index])
        out[:, where] = _positions_first(found)
    return out, states


@torch.library.custom_op("torchtune::gated_delta_rule_backward", mutates_args=())
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, resets: Tensor, states: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    grads = tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v, g, beta))
    d_state = torch.zeros_like(states[0])
    for index, where in reversed(list(enumerate(_slices(k.shape[1])))):
        chunk = _Chunk.of(*(t[:, where] for t in (q, k, v, g, beta, resets)))
        *values, d_state = chunk.gradients(states[index], _heads_first(grad[:, where], k.shape[2]), d_state)
        for result, value in zip(grads, values, strict=True):
            result[:, where] = value
    return grads


@_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, resets: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    first = _first_state(k, v)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    return out, first.new_empty(-(-k.shape[1] // CHUNK) + 1, *first.shape)


@_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, resets: Tensor, states: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v, g, beta))


def _setup_context(ctx, inputs: tuple[Tensor | None, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:6], output[1])
    ctx.mark_non_differentiable(output[1])


def _backward_formula(ctx, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return *_backward(grad, *ctx.saved_tensors), None, None


_forward.register_autograd(_backward_formula, setup_context=_setup_context)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, resets: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Linear attention by the gated delta rule (Yang et al. 2024, arXiv:2412.06464).

    Every head has a state S ``[h_k, h_v]``. A position decays it by ``exp(g)``, adds
    ``beta * k (v - S^T k)^T`` and reads ``S^T q / sqrt(h_k)``; queries and keys are normalised to length 1. S is zero
    before every position of ``resets``. Computed in float32, in chunks of 64 positions; between forward and backward
    only the inputs and the states at the beginnings of chunks are kept.

    Args:
        q: queries ``[b, s, n_k, h_k]``.
        k: keys ``[b, s, n_k, h_k]``.
        v: values ``[b, s, n_v, h_v]``; n_v / n_k consecutive value heads share a key head.
        g: float32 ``[b, s, n_v]``, logarithm of the decay, at most 0.
        beta: ``[b, s, n_v]``, how much of the error is corrected.
        resets: bool ``[b, s]``, the first positions of documents.
        state: S after earlier positions, as this function returns it. No gradient flows into it.

    Returns:
        What was read ``[b, s, n_v, h_v]``, in the dtype of ``v``, and S after the last position,
        float32 ``[b, n_k, n_v / n_k, h_k, h_v]``, without a gradient.
    """
    if k.shape[1] == 1 and state is not None and not torch.is_grad_enabled():
        return _one_position(q, k, v, g, beta, resets, state)
    out, states = _forward(q, k, v, g, beta, resets, state)
    return out, states[-1]


def _one_position(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, resets: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence itself, for decoding."""
    chunk = _Chunk.of(q, k, v, g, beta, resets)
    state = state * chunk.since_state
    state = state + chunk.k.mT @ (chunk.beta * (chunk.v - chunk.k @ state))
    return _positions_first(chunk.q @ state).to(v.dtype), state
