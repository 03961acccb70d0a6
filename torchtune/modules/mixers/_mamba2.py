"""Mamba 2: the state-space model (SSD), computed in chunks, the gated norm of its output, and the mixer."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtune.modules._outside_graphs import outside_graphs
from torchtune.modules.feed_forward import swiglu
from torchtune.modules.kernels import STATE_SPACE, KernelUser
from torchtune.modules.mixers._chunks import Chunks, chunked, positions_first, scalars_first
from torchtune.modules.mixers._mixer import RecurrentMixer, StateCache, heads_obstacle
from torchtune.modules.mixers._short_conv import DepthwiseWeight, index_documents


class _StateSpaceChunks(Chunks):
    """Chunks of the state-space model: position i writes ``beta_i v_i``.

    Within a chunk, the sum over positions is masked attention (Dao & Gu 2024, arXiv:2405.21060). r value heads share a
    key head; the state is ``[b, n_k, h_k, r, h_v]``, so that one matrix product computes all r heads. From chunk to
    chunk, it is multiplied by the decay and added to what the chunk writes: one operator each.
    """

    @staticmethod
    def state_shape(k: Tensor, v: Tensor) -> tuple[int, ...]:
        """Return ``[b, n_k, h_k, r, h_v]``."""
        return k.shape[0], k.shape[2], k.shape[-1], v.shape[2] // k.shape[2], v.shape[-1]

    def read(self, states: Tensor) -> Tensor:
        """See the base class."""
        written = self.beta * self.v  # [n, n_k, r, c, h_v]
        self._outer_products(self.k, written * self.until_end, states[1:])
        decays = self._decays_of_states()
        for index in range(self.num_chunks):
            states[index + 1].addcmul_(states[index], decays[index])
        out = self._weights() @ written
        return out.addcmul_(self._from_states(self.q, states[:-1]), self.since_state)

    def step(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """See the base class."""
        written = self._rows(self.beta * self.v)  # [b, n_k, 1, r * h_v]
        added = (self.k[:, :, 0].mT @ written).view_as(state)
        state = added.addcmul_(state, self._decays_of_states()[0])
        return self._from_states(self.q, state[None]), state

    def gradients(self, states: Tensor, d_out: Tensor, d_states: Tensor) -> tuple[Tensor, ...]:
        """See the base class."""
        q = self.q[:, :, 0]  # [n, n_k, c, h_k]
        k = self.k[:, :, 0]
        # The forward pass again.
        written = self.beta * self.v  # [n, n_k, r, c, h_v]
        weights = self._weights()  # [n, n_k, r, c, c]

        # The states before the chunks are read by q, and decay to the states after them.
        d_read = d_out * self.since_state
        self._outer_products(self.q, d_read, d_states[:-1])
        decays = self._decays_of_states()
        for index in reversed(range(self.num_chunks)):
            d_states[index].addcmul_(d_states[index + 1], decays[index])
        d_afters = d_states[1:]

        # What positions write is read within the chunk, and from the state after it.
        read_from_after = self._from_states(self.k, d_afters)  # [n, n_k, r, c, h_v]
        d_written = (weights.mT @ d_out).addcmul_(read_from_after, self.until_end)
        d_v = positions_first(self.beta * d_written)
        d_beta = scalars_first((d_written * self.v).sum(-1))

        # q and k have a gradient of the scores q k^T, which r heads share, and one of the state.
        d_weights = d_out @ written.mT
        d_scores = (d_weights * self.decay).sum(2)  # [n, n_k, c, c]
        d_q = d_scores @ k + self._rows(d_read) @ self._columns(states).mT  # [n, n_k, c, h_k]
        d_k = d_scores.mT @ q + self._rows(written * self.until_end) @ self._columns(d_afters).mT

        # Gradients of the logarithms of the decays; the last position also decays the state after the chunk.
        d_log_since = (d_read * self._from_states(self.q, states)).sum(-1)  # [n, n_k, r, c]
        d_log_since[..., -1] += self.since_state[..., -1, 0] * (d_afters * states).sum((3, 5)).flatten(0, 1)
        d_log_until = self.until_end[..., 0] * (written * read_from_after).sum(-1)
        d_g = self.d_g(d_weights.mul_(weights), d_log_since, d_log_until)
        return d_q.transpose(1, 2), d_k.transpose(1, 2), d_v, d_g, d_beta

    def _weights(self) -> Tensor:
        """Return the attention weights ``d(i, j) (q_i . k_j)``, ``[n, n_k, r, c, c]``."""
        return self.decay * (self.q @ self.k.mT)

    def _decays_of_states(self) -> Tensor:
        """Return how much each chunk decays a state, ``[m, b, n_k, 1, r, 1]``."""
        return self.split(self.since_state[:, :, None, :, -1])

    def _outer_products(self, x: Tensor, values: Tensor, states: Tensor) -> None:
        """Write the sum over positions of ``[n, n_k, 1, c, h_k]`` times ``[n, n_k, r, c, h_v]`` to m states."""
        heads = x.flatten(0, 2)  # [n * n_k, c, h_k]
        torch.bmm(heads.mT, self._rows(values).flatten(0, 1), out=states.flatten(0, 2).flatten(-2))

    def _from_states(self, x: Tensor, states: Tensor) -> Tensor:
        """Multiply ``[n, n_k, 1, c, h_k]`` by the states of the m chunks: ``[n, n_k, r, c, h_v]``."""
        return (x[:, :, 0] @ self._columns(states)).unflatten(-1, states.shape[-2:]).transpose(2, 3)

    @staticmethod
    def _rows(x: Tensor) -> Tensor:
        """Permute ``[n, n_k, r, c, h_v]`` to ``[n, n_k, c, r * h_v]``."""
        return x.transpose(2, 3).flatten(-2)

    @staticmethod
    def _columns(states: Tensor) -> Tensor:
        """View states ``[m, b, n_k, h_k, r, h_v]`` as ``[n, n_k, h_k, r * h_v]``."""
        return states.flatten(0, 1).flatten(-2)


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


_rule = chunked("state_space", _StateSpaceChunks)


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


class _GatedNorm(torch.autograd.Function):
    """Gated norm that saves only its arguments for the backward pass, instead of five float32 tensors of that size."""

    @staticmethod
    def forward(ctx, x: Tensor, gate: Tensor, scale: Tensor, groups: int, eps: float) -> Tensor:
        ctx.save_for_backward(x, gate, scale)
        ctx.groups = groups
        ctx.eps = eps
        return _gated_norm(x, gate, scale, groups, eps)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, scale = ctx.saved_tensors
        x_float = x.float()
        gate_float = gate.float()
        # The forward pass again, in float32.
        sigmoid = gate_float.sigmoid()
        silu = gate_float * sigmoid
        gated = (x_float * silu).unflatten(-1, (ctx.groups, -1))  # [..., groups, dim / groups]
        rstd = torch.rsqrt(gated.square().mean(-1, keepdim=True) + ctx.eps)
        normed = gated.mul_(rstd)

        d_scale = None
        if ctx.needs_input_grad[2]:
            d_scale = (grad * normed.flatten(-2)).flatten(0, -2).sum(0).to(scale.dtype)  # [dim]
        d_normed = (grad * scale.float()).unflatten(-1, (ctx.groups, -1))
        d_gated = (d_normed - normed * (d_normed * normed).mean(-1, keepdim=True)).mul_(rstd).flatten(-2)
        d_x = d_gated * silu
        # The derivative of silu is sigmoid + silu (1 - sigmoid).
        d_gate = d_gated * x_float * (sigmoid + silu * (1 - sigmoid))
        return d_x.to(x.dtype), d_gate.to(gate.dtype), d_scale, None, None


def _gated_norm(x: Tensor, gate: Tensor, scale: Tensor, groups: int, eps: float) -> Tensor:
    gated = (x.float() * F.silu(gate.float())).unflatten(-1, (groups, -1))  # [..., groups, dim / groups]
    normed = F.rms_norm(gated, gated.shape[-1:], eps=eps).flatten(-2)
    return normed.to(x.dtype) * scale


class GatedGroupNorm(nn.Module):
    """Gated RMSNorm ``scale * y / rms(y)`` for ``y = x * silu(gate)``, over groups of channels.

    Args:
        dim: number of channels.
        groups: number of groups of consecutive channels; divides ``dim``.
        eps: added to the mean square.
    """

    def __init__(self, dim: int, groups: int, eps: float) -> None:
        super().__init__()
        self.groups = groups
        self.eps = eps
        self.scale = nn.Parameter(torch.ones(dim))

    def reset_parameters(self) -> None:
        """Set the scale to 1."""
        nn.init.ones_(self.scale)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Multiply ``x`` ``[..., dim]`` by ``silu(gate)`` and normalize, in float32; return the dtype of ``x``."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return _gated_norm(x, gate, self.scale, self.groups, self.eps)
        return _GatedNorm.apply(x, gate, self.scale, self.groups, self.eps)


class Mamba2(RecurrentMixer, KernelUser):
    """Mamba 2: short convolution, state-space model per head, gated norm, projection (Dao & Gu, arXiv:2405.21060).

    ``in_proj`` returns the paper's z (gate), x, b, c and dt (step size), in this order. ``a_log``, ``dt_bias`` and
    ``skip`` (``D`` in checkpoints) have one number per head.

    Args:
        embed_dim: width d of the hidden states.
        num_heads: number of heads.
        head_dim: size p of a head.
        num_groups: number of groups of consecutive heads with the same b and c.
        state_dim: size n of b and of c.
        conv_taps: kernel size of the convolution of x, b and c.
        norm_eps: eps of the norm.
        has_norm: whether the gated output is normalized, per group.
        dt_min: minimum step size.
        dt_max: maximum step size.
        scales: factors of z, x, b, c and dt.
        out_scale: factor of the output.

    Raises:
        ValueError: ``num_heads`` is not a multiple of ``num_groups``.

    Example:
        >>> mixer = torchtune.modules.mixers.Mamba2(
        ...     embed_dim=8, num_heads=2, head_dim=4, num_groups=1, state_dim=4, conv_taps=2, norm_eps=1e-6
        ... )
        >>> mixer(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    def __init__(
        self,
        *,
        embed_dim: int,
        num_heads: int,
        head_dim: int,
        num_groups: int,
        state_dim: int,
        conv_taps: int,
        norm_eps: float,
        has_norm: bool = True,
        dt_min: float = 0.0,
        dt_max: float = math.inf,
        scales: tuple[float, ...] = (1.0,) * 5,
        out_scale: float = 1.0,
    ) -> None:
        super().__init__()
        if num_heads % num_groups:
            raise ValueError(f"num_heads ({num_heads}) must be a multiple of num_groups ({num_groups}).")
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.num_groups = num_groups
        self.state_dim = state_dim
        self.dt_limits = (dt_min, dt_max)
        self.scales = scales
        self.out_scale = out_scale
        inner = num_heads * head_dim
        self.widths = (inner, num_groups * state_dim, num_groups * state_dim)  # of x, b and c
        self.in_proj = nn.Linear(embed_dim, inner + sum(self.widths) + num_heads, bias=False)
        self.conv = DepthwiseWeight(sum(self.widths), conv_taps, bias=True)
        self.a_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads))
        self.skip = nn.Parameter(torch.empty(num_heads))
        self.norm = GatedGroupNorm(inner, num_groups, norm_eps) if has_norm else None
        self.output_proj = nn.Linear(inner, embed_dim, bias=False)
        self.kernel: Callable[..., Any] | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize exp(a_log) uniform in [1, 16], softplus(dt_bias) log-uniform in [0.001, 0.1], ``skip`` to 1."""
        with torch.no_grad():
            self.a_log.uniform_(1.0, 16.0).log_()
            self.dt_bias.uniform_(math.log(0.001), math.log(0.1)).exp_().expm1_().log_()
            self.skip.fill_(1.0)

    def choose_kernels(self, device: torch.device, dtype: torch.dtype) -> None:
        """See the base class."""
        self.kernel = STATE_SPACE.choose("Mamba 2", device, dtype, state_dim=self.state_dim)

    def _new_cache(self, batch_size: int, dtype: torch.dtype) -> StateCache:
        heads_per_group = self.num_heads // self.num_groups
        state = (batch_size, self.num_groups, self.state_dim, heads_per_group, self.head_dim)
        conv_inputs = (batch_size, self.conv.weight.shape[-1] - 1, sum(self.widths))
        return StateCache(state, conv_inputs, dtype)

    def _mix(self, x: Tensor, reach: Tensor, cache: StateCache | None) -> Tensor:
        gate_scale, *conv_scales, dt_scale = self.scales
        gate, mixed, dt = self.in_proj(x).split((self.widths[0], sum(self.widths), self.num_heads), dim=-1)
        factors = None
        if set(conv_scales) != {1.0}:
            factors = list(zip(self.widths, conv_scales, strict=True))
        share = self.share
        per_head = ((self.num_heads, 1),)
        blocks = (
            (self.num_heads, self.head_dim),
            (self.num_groups, self.state_dim),
            (self.num_groups, self.state_dim),
        )
        # Before the convolution, which then has the positions before each of its own. The gate stays as it is.
        (mixed, dt), reach = share.gather_positions((mixed, dt), (blocks, per_head), reach)
        mixed = self.conv(mixed, reach, cache, factors, silu=True, share=share, blocks=blocks)
        x, b, c = mixed.split([share.num_heads(heads) * head_dim for heads, head_dim in blocks], dim=-1)
        x = x.unflatten(-1, (-1, self.head_dim))  # [b, s, heads, p]
        b = b.unflatten(-1, (-1, self.state_dim))  # [b, s, groups, n]
        c = c.unflatten(-1, (-1, self.state_dim))  # [b, s, groups, n]
        dt_bias = share.own_channels(self.dt_bias, per_head)
        dt = F.softplus(dt.float() * dt_scale + dt_bias).clamp(*self.dt_limits)
        rate = -share.own_channels(self.a_log, per_head).float().exp()
        skip = share.own_channels(self.skip, per_head)
        if self.kernel is not None and cache is None:
            out = kernel_state_space(self.kernel, c, b, x, rate, dt, skip, reach)
        else:
            rows = None if cache is None else cache.rows(x.shape[0])
            state = None if cache is None else cache.state[rows]
            out, state = state_space(c, b, x, rate * dt, dt, reach == 0, state)
            if cache is not None:
                cache.state[rows] = state
            out = torch.addcmul(out, x, skip[:, None])
        out = share.scatter_positions(out).flatten(-2)  # [b, s, heads * p]
        if gate_scale != 1.0:
            gate = gate * gate_scale
        gated = swiglu(gate, out) if self.norm is None else self.norm(out, gate)
        out = self.output_proj(gated)
        if self.out_scale != 1.0:
            out = out * self.out_scale
        return out

    def sharing_obstacle(self, ranks: int) -> str | None:
        """See the base class."""
        return heads_obstacle("Mamba2", ranks, self.num_heads, self.num_groups, "groups")

    @property
    def state_elements(self) -> int:
        """Number of elements of one sequence's state, ``heads * n * p``."""
        return self.num_heads * self.state_dim * self.head_dim
