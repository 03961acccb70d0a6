"""Chunked gated delta rule: linear attention with a decaying state and error correction."""

from collections.abc import Callable

import torch
from torch import Tensor

from torchtune.modules._outside_graphs import outside_graphs
from torchtune.modules.mixers._chunks import Chunk, chunked, positions_first, scalars_first

KERNEL_CHUNK = 64  # positions of a chunk in flash-linear-attention's kernel


class _DeltaChunk(Chunk):
    """Chunk of the gated delta rule.

    Position i writes ``u_i = beta_i (v_i - exp(g_1 + ... + g_i) S^T k_i - sum_{j<i} d(i, j) (k_i . k_j) u_j)``, a
    triangular system per chunk (Yang et al. 2024, arXiv:2412.06464). ``q_scale`` and ``k_scale``,
    ``[b, n_k, 1, c, 1]``, normalize queries to length ``h_k ** -0.5`` and keys to length 1.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, resets: Tensor) -> None:
        super().__init__(q, k, v, g, beta, resets)
        self.q_scale, self.k_scale = (torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (self.q, self.k))
        self.q_scale = self.q_scale * q.shape[-1] ** -0.5
        self.q, self.k = self.q * self.q_scale, self.k * self.k_scale

    @staticmethod
    def state_shape(k: Tensor, v: Tensor) -> tuple[int, ...]:
        """Return ``[b, n_k, r, h_k, h_v]``."""
        return k.shape[0], k.shape[2], v.shape[2] // k.shape[2], k.shape[-1], v.shape[-1]

    def corrections(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the strictly lower triangle of the system, the error ``v - S^T k``, and u ``[b, n_k, r, c, h_v]``."""
        system = (self.k @ self.k.mT) * self.decay * self.beta
        error = self.v - (self.k @ state) * self.since_state
        return system, error, torch.linalg.solve_triangular(system, self.beta * error, upper=False, unitriangular=True)

    def read(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """See the base class."""
        _, _, written = self.corrections(state)
        out = (self.q @ state) * self.since_state + ((self.q @ self.k.mT) * self.decay) @ written
        return out, state * self.since_state[..., -1:, :] + (self.k * self.until_end).mT @ written

    def step(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """See the base class."""
        state = state * self.since_state
        state = state + self.k.mT @ (self.beta * (self.v - self.k @ state))
        return self.q @ state, state

    def gradients(self, state: Tensor, d_out: Tensor, d_after: Tensor) -> tuple[Tensor, ...]:
        """See the base class."""
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
        d_g = self.d_g(d_decay, since, until)
        d_state = k.mT @ d_read_k + q.mT @ d_read_q + d_after * self.since_state[..., -1:, :]

        length = q.shape[-1] ** 0.5
        d_q = self.q_scale * (d_q - q * (q * d_q).sum(-1, keepdim=True) * length**2)
        d_k = self.k_scale * (d_k - k * (k * d_k).sum(-1, keepdim=True))
        d_q, d_k = (t[:, :, 0].transpose(1, 2) for t in (d_q, d_k))
        return d_q, d_k, positions_first(d_error), d_g, scalars_first(d_beta), d_state


@outside_graphs
def kernel_delta_rule(
    kernel: Callable[..., tuple[Tensor, Tensor | None]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    chunks: Tensor | None,
) -> Tensor:
    """Compute the outputs of :func:`gated_delta_rule` by ``chunk_gated_delta_rule`` of flash-linear-attention.

    The kernel takes the documents of a batch as one row, with their cumulative lengths ``cu_seqlens`` and the indices
    of their ``chunks`` of ``KERNEL_CHUNK`` positions ``[chunks, 2]``. Without these it derives them, for which the host
    waits.
    """
    row = [t.flatten(0, 1)[None] for t in (q, k, v, g, beta)]
    options = {"cu_seqlens": cu_seqlens, "chunk_indices": chunks, "chunk_size": KERNEL_CHUNK}
    out, _ = kernel(*row, use_qk_l2norm_in_kernel=True, **options)
    return out.view(v.shape)


_rule = chunked("gated_delta_rule", _DeltaChunk)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, resets: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute linear attention with the gated delta rule (Yang et al. 2024, arXiv:2412.06464).

    Every head has a state S ``[h_k, h_v]``. A position decays it by ``exp(g)``, adds
    ``beta * k (v - S^T k)^T`` and outputs ``S^T q / sqrt(h_k)``; queries and keys are normalized to length 1. S is zero
    before each position where ``resets`` is True. The computation is in float32, in chunks of 64 positions; only the
    inputs and the state at the beginning of each chunk are saved for the backward pass.

    Args:
        q: queries ``[b, s, n_k, h_k]``.
        k: keys ``[b, s, n_k, h_k]``.
        v: values ``[b, s, n_v, h_v]``; n_v / n_k consecutive value heads share a key head.
        g: float32 ``[b, s, n_v]``, logarithm of the decay, at most 0.
        beta: ``[b, s, n_v]``, write strength: the fraction of the error to correct.
        resets: bool ``[b, s]``, True at the first positions of documents.
        state: S after earlier positions, as returned by this function; gets no gradient.

    Returns:
        Outputs ``[b, s, n_v, h_v]`` in the dtype of ``v``, and S after the last position, float32
        ``[b, n_k, n_v / n_k, h_k, h_v]``, without a gradient.
    """
    return _rule(q, k, v, g, beta, resets, state)
