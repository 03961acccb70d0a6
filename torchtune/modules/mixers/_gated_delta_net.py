"""Gated DeltaNet, the linear attention of Qwen 3.5 and Qwen3-Next: the gated delta rule, and its mixer.

The rule is linear attention with a decaying state and error correction, computed in chunks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtune.data import Documents
from torchtune.modules._outside_graphs import outside_graphs
from torchtune.modules.kernels import DELTA_RULE, KernelUser
from torchtune.modules.kernels.documents import Boundaries
from torchtune.modules.mixers._chunks import Chunks, chunked
from torchtune.modules.mixers._mixer import RecurrentMixer, StateCache, heads_obstacle
from torchtune.modules.mixers._short_conv import DepthwiseWeight
from torchtune.modules.rms_norm import rms_norm

KERNEL_CHUNK = 64  # positions of a chunk in flash-linear-attention's kernel


class _DeltaChunks(Chunks):
    """Chunks of the gated delta rule.

    Position i writes ``u_i = beta_i (v_i - exp(g_1 + ... + g_i) S^T k_i - sum_{j<i} d(i, j) (k_i . k_j) u_j)``, a
    triangular system ``(I + system) u = beta * error`` per chunk (Yang et al. 2024, arXiv:2412.06464). All systems are
    inverted at once, for u at S = 0 and for the matrix W that multiplies S. From chunk to chunk only ``u - W S`` and
    the next state are left, three operators. ``q_scale`` and ``k_scale``, ``[n, n_k, 1, c, 1]``, normalize queries to
    length ``h_k ** -0.5`` and keys to length 1.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, resets: Tensor) -> None:
        super().__init__(q, k, v, g, beta, resets)
        # 1e-6, as in the published models: a vector of zeros keeps its length.
        squared_q_lengths = self.q.square().sum(-1, keepdim=True)  # [n, n_k, 1, c, 1]
        squared_k_lengths = self.k.square().sum(-1, keepdim=True)
        self.q_scale = torch.rsqrt(squared_q_lengths + 1e-6) * q.shape[-1] ** -0.5
        self.k_scale = torch.rsqrt(squared_k_lengths + 1e-6)
        self.q = self.q * self.q_scale
        self.k = self.k * self.k_scale

    @staticmethod
    def state_shape(k: Tensor, v: Tensor) -> tuple[int, ...]:
        """Return ``[b, n_k, r, h_k, h_v]``."""
        batch_size, _, key_heads, key_dim = k.shape
        value_heads, value_dim = v.shape[2:]
        return batch_size, key_heads, value_heads // key_heads, key_dim, value_dim

    def read(self, states: Tensor, out: Tensor, *, starts_empty: bool) -> None:
        """See the base class, also for the letters of shapes; an empty state is multiplied like any other."""
        # Matrices [n, n_k, r, c, c] have no names here and below, so that each is freed once it is used.
        solution = self._inverse((self.k @ self.k.mT) * self.decay) * self.beta.mT  # [n, n_k, r, c, c]
        written = solution @ self.v  # [n, n_k, r, c, h_v], without the part of S
        state_weights = solution @ (self.k * self.since_state)  # [n, n_k, r, c, h_k]
        keys_until_end = self.k * self.until_end
        decays = self._decays_of_states()
        written_of_chunks = self._by_chunk(written)  # views: the loop changes `written`
        weights_of_chunks = self._by_chunk(state_weights)
        keys_of_chunks = self._by_chunk(keys_until_end)
        for index in range(self.num_chunks):
            # In place: `written` becomes u = written - W S, for the state S before the chunk, which is known only now.
            chunk_written = written_of_chunks[index]
            chunk_written.baddbmm_(weights_of_chunks[index], states[index].flatten(0, 2), alpha=-1)
            torch.mul(states[index], decays[index], out=states[index + 1])
            states[index + 1].flatten(0, 2).baddbmm_(keys_of_chunks[index].mT, chunk_written)
        from_chunk = ((self.q @ self.k.mT) * self.decay) @ written
        from_states = self.q @ states[:-1].flatten(0, 1)
        torch.addcmul(self.split(from_chunk), self.split(from_states), self.split(self.since_state), out=out)

    def step(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """See the base class."""
        state = state * self.since_state
        state = state + self.k.mT @ (self.beta * (self.v - self.k @ state))
        return self.q @ state, state

    def gradients(self, states: Tensor, d_out: Tensor, d_state: Tensor | None, grads: Sequence[Tensor]) -> Tensor:
        """See the base class."""
        q = self.q
        k = self.k
        beta = self.beta
        decay = self.decay
        states_before = states[:-1].flatten(0, 1)  # [n, n_k, r, h_k, h_v]
        # The forward pass again, for all chunks at once, because the states are known.
        decayed_similarities = (k @ k.mT) * decay  # [n, n_k, r, c, c]
        inverse = self._inverse(decayed_similarities)
        solution = inverse * beta.mT
        keys_since_state = k * self.since_state  # [n, n_k, r, c, h_k]
        keys_until_end = k * self.until_end
        error = self.v - keys_since_state @ states_before
        written = solution @ error  # u, [n, n_k, r, c, h_v]
        scores = q @ k.mT  # [n, n_k, 1, c, c], not decayed

        # Values that positions write are read within the chunk, and from the state after it.
        d_from_states = d_out * self.since_state  # of from_states = q @ states_before
        d_written = (scores * decay).mT @ d_out  # [n, n_k, r, c, h_v], by readers within the chunk
        d_states = torch.empty_like(states)
        d_states[-1] = 0.0 if d_state is None else d_state
        # In place: fills d_states, and adds the gradient by the states after the chunks to d_written.
        state_weights = solution @ keys_since_state
        self._backward_through_states(d_states, d_written, d_from_states, state_weights, keys_until_end)
        d_states_after = d_states[1:].flatten(0, 1)  # [n, n_k, r, h_k, h_v]

        # The triangular system (I + system) u = target, with system = beta * decayed_similarities below the diagonal
        # and target = beta * error: its gradient solves the transposed system. The gradient of the system is the
        # negative product of d_target and u; its sign is left to the sums below, which saves a pass over the matrices.
        d_target = inverse.mT @ d_written
        negative_d_system = (d_target @ written.mT).tril_(-1)  # [n, n_k, r, c, c]
        d_error = beta * d_target  # also the gradient of v
        d_beta = (d_target * error).sum(-1).sub_((negative_d_system * decayed_similarities).sum(-1))

        # The products q k^T (scores) and k k^T (similarities) are multiplied by the decay: d_scores and
        # negative_d_similarities are gradients of the products, d_log_decay is that of the decay's logarithm.
        d_scores = (d_out @ written.mT).mul_(decay)  # [n, n_k, r, c, c]
        negative_d_decayed_similarities = negative_d_system.mul_(beta)
        d_log_decay = (d_scores * scores).addcmul_(negative_d_decayed_similarities, decayed_similarities, value=-1)
        negative_d_similarities = negative_d_decayed_similarities.mul_(decay)

        # Queries and keys also read the incoming state, and keys write to the outgoing one: [n, n_k, r, c, h_k].
        d_q_by_state = d_from_states @ states_before.mT
        negative_d_k_by_state = (d_error * self.since_state) @ states_before.mT
        d_keys_until_end = written @ d_states_after.mT
        d_k = (d_scores.mT @ q).addcmul_(self.until_end, d_keys_until_end).sub_(negative_d_k_by_state)
        # Similarities are symmetric products: a key is a factor of its row and of its column.
        d_k.sub_((negative_d_similarities + negative_d_similarities.mT) @ k)

        # Gradients of the logarithms of the decays; since_state of the last position also decays the state before the
        # chunk to the state after it.
        d_log_since = (q * d_q_by_state).sum(-1).sub_((k * negative_d_k_by_state).sum(-1))
        d_decays_of_states = (d_states_after * states_before).sum((-2, -1))  # [n, n_k, r]
        d_log_since[..., -1] += self.since_state[..., -1, 0] * d_decays_of_states
        d_log_until = (keys_until_end * d_keys_until_end).sum(-1)
        d_g = self.d_g(d_log_decay, d_log_since, d_log_until)

        # Through the normalization, whose queries have the length h_k ** -0.5; r value heads share q and k.
        d_q = (d_q_by_state.add_(d_scores @ k)).sum(2, keepdim=True)  # [n, n_k, 1, c, h_k]
        d_k = d_k.sum(2, keepdim=True)
        # The part of a gradient along its vector changes the length, which the normalization takes away again.
        d_q_length = (q * d_q).sum(-1, keepdim=True).mul_(q.shape[-1])  # [n, n_k, 1, c, 1]
        d_q = self.q_scale * (d_q - q * d_q_length)
        d_k_length = (k * d_k).sum(-1, keepdim=True)
        d_k = self.k_scale * (d_k - k * d_k_length)
        for target, gradient in zip(grads, (d_q, d_k, d_error, d_g, d_beta), strict=True):
            target.copy_(self.split(gradient))
        return d_states[0]

    def _backward_through_states(
        self, d_states: Tensor, d_written: Tensor, d_from_states: Tensor, state_weights: Tensor, keys_until_end: Tensor
    ) -> None:
        """Compute the gradients of the states, from the last to the first.

        Args:
            d_states: ``[m + 1, b, ...]``; ``d_states[-1]`` is given, the others are written.
            d_written: gradient of the written values by readers within the chunk, ``[n, n_k, r, c, h_v]``, to which
                that by the state after the chunk is added.
            d_from_states: gradient of ``q @ S``, ``[n, n_k, r, c, h_v]``.
            state_weights: W, ``[n, n_k, r, c, h_k]``.
            keys_until_end: keys, decayed until the end of their chunk, ``[n, n_k, r, c, h_k]``.
        """
        torch.matmul(self.q.mT, d_from_states, out=d_states[:-1].flatten(0, 1))
        decays = self._decays_of_states()
        # A state is read by the queries of its chunk (above), decays to the next state, and changes the values that its
        # chunk writes by -W S. So the gradient of these values has to be complete before that of the state.
        d_written_of_chunks = self._by_chunk(d_written)
        weights_of_chunks = self._by_chunk(state_weights)
        keys_of_chunks = self._by_chunk(keys_until_end)
        for index in reversed(range(self.num_chunks)):
            chunk_d_written = d_written_of_chunks[index]
            chunk_d_written.baddbmm_(keys_of_chunks[index], d_states[index + 1].flatten(0, 2))
            d_states[index].addcmul_(d_states[index + 1], decays[index])
            d_states[index].flatten(0, 2).baddbmm_(weights_of_chunks[index].mT, chunk_d_written, alpha=-1)

    def _inverse(self, decayed_similarities: Tensor) -> Tensor:
        """Return the inverse of I + system for the products of keys ``k k^T``, decayed, ``[n, n_k, r, c, c]``."""
        num_positions = decayed_similarities.shape[-1]
        identity = torch.eye(num_positions, dtype=torch.float32, device=decayed_similarities.device)
        # unitriangular: the diagonal is read as 1, whatever it holds.
        return torch.linalg.solve_triangular(
            decayed_similarities * self.beta, identity, upper=False, unitriangular=True
        )

    def _decays_of_states(self) -> Tensor:
        """Return how much each chunk decays a state, ``[m, b, n_k, r, 1, 1]``."""
        return self.split(self.since_state[..., -1:, :])

    def _by_chunk(self, x: Tensor) -> Sequence[Tensor]:
        """View ``[n, n_k, r, c, h]`` as m tensors ``[b * n_k * r, c, h]``."""
        return self.split(x).flatten(1, 3).unbind()


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
    row = [tensor.flatten(0, 1)[None] for tensor in (q, k, v, g, beta)]  # [1, b * s, ...]
    options = {"cu_seqlens": cu_seqlens, "chunk_indices": chunks, "chunk_size": KERNEL_CHUNK}
    out, _ = kernel(*row, use_qk_l2norm_in_kernel=True, **options)
    return out.view(v.shape)


_rule = chunked("gated_delta_rule", _DeltaChunks)


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


class GatedRMSNorm(nn.Module):
    """Gated RMSNorm ``scale * x / rms(x) * silu(gate)`` over the last dimension.

    Args:
        dim: size of the last dimension.
        eps: added to the mean square.
    """

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.scale = nn.Parameter(torch.ones(dim))

    def reset_parameters(self) -> None:
        """Set the scale to 1."""
        nn.init.ones_(self.scale)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalize ``x`` ``[..., dim]`` and multiply by ``silu(gate)`` in float32; return the dtype of ``x``."""
        normed = rms_norm(x, self.eps, self.scale)
        gated = normed.float() * F.silu(gate.float())
        return gated.to(x.dtype)


class GatedDeltaNet(RecurrentMixer, KernelUser):
    """Gated DeltaNet: short convolution of queries, keys and values, gated delta rule, gated norm, projection.

    Args:
        embed_dim: width d of the hidden states.
        num_key_heads: number n_k of query and key heads.
        num_value_heads: number n_v of value heads, a multiple of n_k.
        key_dim: h_k, size of a query or key head.
        value_dim: h_v, size of a value head.
        conv_taps: kernel size of the convolution.
        norm_eps: eps of the norm.
        fused: use two fused projections, ``qkvz_proj`` and ``ba_proj``, instead of four.

    Raises:
        ValueError: ``num_value_heads`` is not a multiple of ``num_key_heads``.

    Example:
        >>> mixer = torchtune.modules.mixers.GatedDeltaNet(
        ...     embed_dim=8, num_key_heads=1, num_value_heads=2, key_dim=4, value_dim=4, conv_taps=2, norm_eps=1e-6
        ... )
        >>> mixer(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    def __init__(
        self,
        *,
        embed_dim: int,
        num_key_heads: int,
        num_value_heads: int,
        key_dim: int,
        value_dim: int,
        conv_taps: int,
        norm_eps: float,
        fused: bool = False,
    ) -> None:
        super().__init__()
        if num_value_heads % num_key_heads:
            raise ValueError(
                f"num_value_heads ({num_value_heads}) must be a multiple of num_key_heads ({num_key_heads})."
            )
        self.num_key_heads = num_key_heads
        self.num_value_heads = num_value_heads
        self.key_dim = key_dim
        self.value_dim = value_dim
        # Of queries, keys and values.
        self.widths = (num_key_heads * key_dim, num_key_heads * key_dim, num_value_heads * value_dim)
        self.fused = fused
        # The gate z is as wide as the values; b (write strength) and a (decay) are a number per value head.
        if fused:
            self.qkvz_proj = nn.Linear(embed_dim, sum(self.widths) + self.widths[2], bias=False)
            self.ba_proj = nn.Linear(embed_dim, 2 * num_value_heads, bias=False)
        else:
            self.qkv_proj = nn.Linear(embed_dim, sum(self.widths), bias=False)
            self.z_proj = nn.Linear(embed_dim, self.widths[2], bias=False)
            self.b_proj = nn.Linear(embed_dim, num_value_heads, bias=False)
            self.a_proj = nn.Linear(embed_dim, num_value_heads, bias=False)
        self.conv = DepthwiseWeight(sum(self.widths), conv_taps)
        self.a_log = nn.Parameter(torch.empty(num_value_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_value_heads))
        self.norm = GatedRMSNorm(value_dim, norm_eps)
        self.output_proj = nn.Linear(self.widths[2], embed_dim, bias=False)
        self.kernel: Callable[..., Any] | None = None  # set by choose_kernels, when device and dtype are known
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the decay: exp(a_log) is uniform in [0.01, 16], ``dt_bias`` is 1."""
        with torch.no_grad():
            self.a_log.uniform_(0.01, 16.0).log_()
            self.dt_bias.fill_(1.0)

    def choose_kernels(self, device: torch.device, dtype: torch.dtype) -> None:
        """See the base class."""
        head_dim = max(self.key_dim, self.value_dim)
        self.kernel = DELTA_RULE.choose("Gated DeltaNet", device, dtype, head_dim=head_dim)

    @property
    def kernel_chunk(self) -> int | None:
        """See the base class."""
        return None if self.kernel is None else KERNEL_CHUNK

    @property
    def conv_gap(self) -> int:
        """See the base class."""
        return self.conv.gap

    def _new_cache(self, batch_size: int, dtype: torch.dtype) -> StateCache:
        values_per_key = self.num_value_heads // self.num_key_heads
        state = (batch_size, self.num_key_heads, values_per_key, self.key_dim, self.value_dim)
        conv_inputs = (batch_size, self.conv.weight.shape[-1] - 1, sum(self.widths))
        return StateCache(state, conv_inputs, dtype)

    def _mix(
        self, x: Tensor, reach: Tensor, cache: StateCache | None, documents: Documents | Boundaries | None
    ) -> Tensor:
        # Concatenated queries, keys and values, and the inputs of the gate (z), of beta (b) and of the decay (a).
        if self.fused:
            qkv, z = self.qkvz_proj(x).split((sum(self.widths), self.widths[2]), dim=-1)
            b, a = self.ba_proj(x).chunk(2, dim=-1)
        else:
            qkv = self.qkv_proj(x)
            z = self.z_proj(x)
            b = self.b_proj(x)
            a = self.a_proj(x)
        share = self.share
        per_head = ((self.num_value_heads, 1),)
        blocks = (
            (self.num_key_heads, self.key_dim),
            (self.num_key_heads, self.key_dim),
            (self.num_value_heads, self.value_dim),
        )
        # Convolution and rule run along positions: with context parallelism, this rank gets all positions of some
        # heads. The gate works position by position, so that it stays as it is.
        (qkv, b, a), reach = share.gather_positions((qkv, b, a), (blocks, per_head, per_head), reach)
        mixed = self.conv(qkv, reach, cache, silu=True, share=share, blocks=blocks, documents=documents)
        local_widths = [share.num_heads(heads) * head_dim for heads, head_dim in blocks]
        q, k, v = mixed.split(local_widths, dim=-1)
        q = q.unflatten(-1, (-1, self.key_dim))  # [b, s, n_k, h_k]
        k = k.unflatten(-1, (-1, self.key_dim))  # [b, s, n_k, h_k]
        v = v.unflatten(-1, (-1, self.value_dim))  # [b, s, n_v, h_v]
        rate = -share.local_channels(self.a_log, per_head).float().exp()
        dt_bias = share.local_channels(self.dt_bias, per_head)
        log_decay = rate * F.softplus(a.float() + dt_bias)  # [b, s, n_v]
        beta = b.sigmoid()
        # The kernel reads documents instead of `reach`, and neither takes nor returns a cached state.
        if self.kernel is not None and documents is not None and cache is None:
            boundaries = documents
            if isinstance(documents, Documents):  # outside of a decoder, which makes the boundaries for all layers
                boundaries = Boundaries.of(documents, kernel_chunk=KERNEL_CHUNK)
            out = kernel_delta_rule(
                self.kernel, q, k, v, log_decay, beta, boundaries.cu_seqlens, boundaries.kernel_chunks
            )
        else:
            state = None
            if cache is not None:
                rows = cache.rows(x.shape[0])
                state = cache.state[rows]
            out, state = gated_delta_rule(q, k, v, log_decay, beta, reach == 0, state)
            if cache is not None:
                cache.state[rows] = state
        out = share.scatter_positions(out)  # all heads of this rank's positions again, as in the gate
        gate = z.unflatten(-1, (-1, self.value_dim))
        normed = self.norm(out, gate)  # [b, s, n_v, h_v]
        return self.output_proj(normed.flatten(-2))

    def sharing_obstacle(self, ranks: int) -> str | None:
        """See the base class."""
        return heads_obstacle("GatedDeltaNet", ranks, self.num_value_heads, self.num_key_heads, "key heads")

    @property
    def state_elements(self) -> int:
        """Number of elements of one sequence's state, ``n_v * h_k * h_v``."""
        return self.num_value_heads * self.key_dim * self.value_dim
