"""Chunked gated delta rule: linear attention with a state that decays and is corrected."""

import torch
from torch import Tensor

from torchtune.modules.mixers._chunks import Chunk, chunked


class _DeltaChunk(Chunk):
    """Position i writes ``u_i = beta_i (v_i - exp(g_1 + ... + g_i) S^T k_i - sum_{j<i} d(i, j) (k_i . k_j) u_j)``.

    This is a triangular system per chunk (Yang et al. 2024, arXiv:2412.06464). ``q_scale`` and ``k_scale``,
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
        """Return the system's matrix (strictly lower part), the error ``v - S^T k`` and u ``[b, n_k, r, c, h_v]``."""
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


_rule = chunked("gated_delta_rule", _DeltaChunk)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, resets: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute linear attention with the gated delta rule (Yang et al. 2024, arXiv:2412.06464).

    Every head has a state S ``[h_k, h_v]``. A position decays it by ``exp(g)``, adds
    ``beta * k (v - S^T k)^T`` and outputs ``S^T q / sqrt(h_k)``; queries and keys are normalized to length 1. S is zero
    before every position of ``resets``. Computed in float32, in chunks of 64 positions; only the inputs and the states
    at the beginnings of chunks are saved for the backward pass.

    Args:
        q: queries ``[b, s, n_k, h_k]``.
        k: keys ``[b, s, n_k, h_k]``.
        v: values ``[b, s, n_v, h_v]``; n_v / n_k consecutive value heads share a key head.
        g: float32 ``[b, s, n_v]``, logarithm of the decay, at most 0.
        beta: ``[b, s, n_v]``, fraction of the error that is corrected.
        resets: bool ``[b, s]``, True at the first positions of documents.
        state: S after earlier positions, as returned by this function; gets no gradient.

    Returns:
        Outputs ``[b, s, n_v, h_v]`` in the dtype of ``v``, and S after the last position, float32
        ``[b, n_k, n_v / n_k, h_k, h_v]``, without a gradient.
    """
    return _rule(q, k, v, g, beta, resets, state)
