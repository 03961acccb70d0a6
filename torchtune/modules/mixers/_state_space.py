"""Chunked state-space model (SSD) of Mamba 2: linear attention with a decaying state."""

from collections.abc import Callable

from torch import Tensor

from torchtune.modules._outside_graphs import outside_graphs
from torchtune.modules.mixers._causal_conv import index_documents
from torchtune.modules.mixers._chunks import Chunk, chunked, positions_first, scalars_first


class _StateSpaceChunk(Chunk):
    """Chunk of the state-space model: position i writes ``beta_i v_i``.

    Within a chunk, the sum over positions is masked attention (Dao & Gu 2024, arXiv:2405.21060). r value heads share a
    key head; the state is ``[b, n_k, h_k, r, h_v]``, so that one matrix product computes all r heads.
    """

    @staticmethod
    def state_shape(k: Tensor, v: Tensor) -> tuple[int, ...]:
        """Return ``[b, n_k, h_k, r, h_v]``."""
        return k.shape[0], k.shape[2], k.shape[-1], v.shape[2] // k.shape[2], v.shape[-1]

    def read(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """See the base class."""
        written = self.beta * self.v
        out = self._weights() @ written
        return out.add_(self._from_state(self.q, state) * self.since_state), self._after(state, written)

    def step(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """See the base class."""
        state = self._after(state, self.beta * self.v)
        return self._from_state(self.q, state), state

    def gradients(self, state: Tensor, d_out: Tensor, d_after: Tensor) -> tuple[Tensor, ...]:
        """See the base class."""
        q, k = self.q[:, :, 0], self.k[:, :, 0]
        written, weights = self.beta * self.v, self._weights()
        from_after = self._from_state(self.k, d_after)
        d_written = (weights.mT @ d_out).add_(from_after * self.until_end)
        d_weights = d_out @ written.mT
        d_scores = (d_weights * self.decay).sum(2)
        read, kept = self._rows(d_out * self.since_state), self._rows(written * self.until_end)
        d_q = d_scores @ k + read @ state.flatten(-2).mT
        d_k = d_scores.mT @ q + kept @ d_after.flatten(-2).mT
        since = (d_out * self._from_state(self.q, state) * self.since_state).sum(-1)
        since[..., -1] += self.since_state[..., -1, 0] * (d_after * state).sum((2, 4))
        until = self.until_end[..., 0] * (written * from_after).sum(-1)
        d_g = self.d_g(d_weights.mul_(weights), since, until)
        d_state = (q.mT @ read).view_as(state).add_(d_after * self._decay_of_state())
        d_v, d_beta = positions_first(self.beta * d_written), scalars_first((d_written * self.v).sum(-1))
        return d_q.transpose(1, 2), d_k.transpose(1, 2), d_v, d_g, d_beta, d_state

    def _weights(self) -> Tensor:
        """Return the attention weights ``d(i, j) (q_i . k_j)``, ``[b, n_k, r, c, c]``."""
        return self.decay * (self.q @ self.k.mT)

    def _after(self, state: Tensor, written: Tensor) -> Tensor:
        added = self.k[:, :, 0].mT @ self._rows(written * self.until_end)
        return added.view_as(state).add_(state * self._decay_of_state())

    def _decay_of_state(self) -> Tensor:
        return self.since_state[:, :, None, :, -1]

    @staticmethod
    def _from_state(x: Tensor, state: Tensor) -> Tensor:
        """Multiply ``[b, n_k, 1, c, h_k]`` by the state: ``[b, n_k, r, c, h_v]``."""
        return (x[:, :, 0] @ state.flatten(-2)).unflatten(-1, state.shape[-2:]).transpose(2, 3)

    @staticmethod
    def _rows(x: Tensor) -> Tensor:
        """Permute ``[b, n_k, r, c, h_v]`` to ``[b, n_k, c, r * h_v]``."""
        return x.transpose(2, 3).flatten(-2)


_KERNEL_CHUNK = 256  # positions per chunk of the kernel, as in the published models


@outside_graphs
def kernel_state_space(
    kernel: Callable[..., Tensor],
    c: Tensor,
    b: Tensor,
    x: Tensor,
    rate: Tensor,
    dt: Tensor,
    skip: Tensor,
    reach: Tensor,
) -> Tensor:
    """Compute :func:`state_space` and its skip connection by ``mamba_chunk_scan_combined`` of mamba-ssm.

    ``rate`` ``[heads]`` is the logarithm of the decay per step size: g of :func:`state_space` is ``rate * dt``.
    """
    return kernel(x, dt, rate, b, c, _KERNEL_CHUNK, D=skip, seq_idx=index_documents(reach, len(x)))


_rule = chunked("state_space", _StateSpaceChunk)


def state_space(
    c: Tensor, b: Tensor, x: Tensor, g: Tensor, dt: Tensor, resets: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the state-space model (SSD) of Mamba 2, without its skip connection (Dao & Gu 2024, arXiv:2405.21060).

    Every head has a state S ``[n, p]``. A position decays it by ``exp(g)``, adds ``dt * b x^T`` and outputs ``S^T c``.
    S is zero before each position where ``resets`` is True. The computation is in float32, in chunks of 64 positions;
    only the inputs and the state at the beginning of each chunk are saved for the backward pass.

    Args:
        c: queries ``[b, s, groups, n]``.
        b: keys ``[b, s, groups, n]``.
        x: values ``[b, s, heads, p]``; heads / groups consecutive heads share a group.
        g: float32 ``[b, s, heads]``, logarithm of the decay, at most 0.
        dt: float32 ``[b, s, heads]``, step size.
        resets: bool ``[b, s]``, True at the first positions of documents.
        state: S after earlier positions, as returned by this function; gets no gradient.

    Returns:
        Outputs ``[b, s, heads, p]`` in the dtype of ``x``, and S after the last position, float32
        ``[b, groups, n, heads / groups, p]``, without a gradient.
    """
    return _rule(c, b, x, g, dt, resets, state)
