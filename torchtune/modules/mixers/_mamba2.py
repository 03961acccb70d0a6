"""Mamba 2: the state-space model (SSD), computed in chunks, the gated norm of its output, and the mixer."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtune.data import Documents
from torchtune.modules._outside_graphs import outside_graphs
from torchtune.modules.feed_forward import swiglu
from torchtune.modules.kernels import STATE_SPACE, KernelUser
from torchtune.modules.kernels.documents import Boundaries
from torchtune.modules.mixers._chunks import CHUNK, Chunks, chunked, decays_between, sum_of_later
from torchtune.modules.mixers._mixer import RecurrentMixer, StateCache, heads_obstacle
from torchtune.modules.mixers._short_conv import DepthwiseWeight, index_documents
from torchtune.modules.rms_norm import normalize, normalize_backward


class _StateSpaceChunks(Chunks):
    """Chunks of the state-space model: position i writes ``beta_i v_i``.

    Within a chunk, the sum over positions is masked attention (Dao & Gu 2024, arXiv:2405.21060). r value heads share a
    key head; the state is ``[b, n_k, r, h_v, h_k]``, so that one matrix product computes all r heads. Another product
    computes the states of several chunks: that of the decays between chunks and the sums that chunks write.
    """

    multiplies_states = True

    @staticmethod
    def state_shape(k: Tensor, v: Tensor) -> tuple[int, ...]:
        """Return ``[b, n_k, r, h_v, h_k]``."""
        batch_size, _, key_heads, key_dim = k.shape
        value_heads, value_dim = v.shape[2:]
        return batch_size, key_heads, value_heads // key_heads, value_dim, key_dim

    @classmethod
    def elements_of_chunk(cls, k: Tensor, v: Tensor) -> int:
        """See the base class; heads share queries and keys."""
        rows, _, value_heads, value_dim = v.shape
        key_heads, key_dim = k.shape[2:]
        elements_of_head = max(CHUNK * CHUNK, CHUNK * value_dim, key_dim * value_dim)
        return rows * max(value_heads * elements_of_head, key_heads * CHUNK * key_dim)

    def read(self, states: Tensor, out: Tensor, *, starts_empty: bool) -> None:
        """See the base class."""
        written = self.v * self.beta  # [n, n_k, r, c, h_v], in the order of v
        self._write_states(self._scaled_rows(written, self.until_end), states, starts_empty)
        from_states = self._read_states(self.q, states[:-1])
        from_chunk = self._weights() @ written
        torch.addcmul(self.split(from_chunk), self.split(from_states), self.split(self.since_state), out=out)

    def step(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """See the base class."""
        written = self._scaled_rows(self.v, self.beta)  # [b, n_k, 1, r * h_v]
        added = (written.mT @ self.k[:, :, 0]).view_as(state)
        state = added.addcmul_(state, self.since_state)
        return self._read_states(self.q, state[None]), state

    def gradients(self, states: Tensor, d_out: Tensor, d_state: Tensor | None, grads: Sequence[Tensor]) -> Tensor:
        """See the base class."""
        q = self.q[:, :, 0]  # [n, n_k, c, h_k]
        k = self.k[:, :, 0]
        # The forward pass again.
        written = self.v * self.beta  # [n, n_k, r, c, h_v], in the order of v
        weights = self._weights()  # [n, n_k, r, c, c]
        out = weights @ written
        out.addcmul_(self._read_states(self.q, states[:-1]), self.since_state)

        # With the sums G of g until a position, all that it reads has the factor exp(G), all that it writes exp(-G),
        # and the state after the chunk exp(G) of the last position.
        d_cumulative = out.mul_(d_out).sum(-1)  # [n, n_k, r, c], gradient of G
        d_written = weights.mT @ d_out  # [n, n_k, r, c, h_v], by readers within the chunk
        del out, weights

        # The states before the chunks are read by q, and decay to the states after them.
        d_from_states = self._scaled_rows(d_out, self.since_state)  # [n, n_k, c, r * h_v]
        d_states = self._gradients_of_states(d_from_states, states, d_state)  # [m + 1, b, ...]
        d_states_after = d_states[1:]
        d_log_chunk_decays = (d_states_after * states[1:]).sum((-2, -1))  # [m, b, n_k, r]
        d_cumulative[..., -1].add_(d_log_chunk_decays.flatten(0, 1))

        # Values that positions write are also read from the state after the chunk: d_written is complete.
        d_written.addcmul_(self._read_states(self.k, d_states_after), self.until_end)
        d_beta = (d_written * self.v).sum(-1)  # [n, n_k, r, c]
        d_cumulative.addcmul_(self.beta[..., 0], d_beta, value=-1)
        d_g = sum_of_later(d_cumulative)

        # q and k have a gradient of the scores q k^T, which r heads share, and one of the state.
        d_scores = (d_out @ written.mT).mul_(self.decay).sum(2)  # [n, n_k, c, c]
        matrices_before = self._state_matrices(states[:-1])
        d_q = self._sum_of_products(d_scores, k, d_from_states, matrices_before)  # [n, n_k, c, h_k]
        written_to_after = self._scaled_rows(written, self.until_end)
        d_matrices_after = self._state_matrices(d_states_after)
        d_k = self._sum_of_products(d_scores.mT, q, written_to_after, d_matrices_after)

        grad_q, grad_k, grad_v, grad_g, grad_beta = grads
        grad_q.copy_(self.split(d_q[:, :, None]))
        grad_k.copy_(self.split(d_k[:, :, None]))
        torch.mul(self.split(d_written), self.split(self.beta), out=grad_v)
        grad_g.copy_(self.split(d_g))
        grad_beta.copy_(self.split(d_beta))
        return d_states[0]

    def _weights(self) -> Tensor:
        """Return the attention weights ``d(i, j) (q_i . k_j)``, ``[n, n_k, r, c, c]``."""
        return self.decay * (self.q @ self.k.mT)

    def _write_states(self, written_to_after: Tensor, states: Tensor, starts_empty: bool) -> None:
        """Compute ``states[1:]`` of ``[m + 1, b, ...]``: the sums that chunks write, and decayed earlier states.

        Args:
            written_to_after: values that positions write to the state after their chunk, ``[n, n_k, c, r * h_v]``.
            states: all states; ``states[0]`` is given, the others are written.
            starts_empty: whether ``states[0]`` is zero.
        """
        states_after = states[1:]
        if self.num_chunks == 1:
            self._outer_products(written_to_after, self.k, states_after)
            if not starts_empty:
                states_after[0].addcmul_(states[0], self.since_state[..., -1:, :])
            return
        added = torch.empty_like(states_after)
        self._outer_products(written_to_after, self.k, added)
        decays = decays_between(self.log_since_start)  # [b * n_v, m, m]
        torch.bmm(decays, self._by_head(added), out=self._by_head(states_after))
        if not starts_empty:
            since_start = self.log_since_start.exp().to(states.dtype)
            self._by_head(states_after).addcmul_(self._by_head(states[:1]), since_start[..., None])

    def _gradients_of_states(self, d_from_states: Tensor, states: Tensor, d_state: Tensor | None) -> Tensor:
        """Compute the gradients of all states ``[m + 1, b, ...]``: by the positions that read it, and by later states.

        Args:
            d_from_states: gradient of the values that positions read from the state before their chunk,
                ``[n, n_k, c, r * h_v]``.
            states: ``[m + 1, b, ...]``.
            d_state: gradient of the last state; None: zero.
        """
        d_by_readers = torch.empty_like(states)  # by positions alone
        d_by_readers[-1] = 0.0 if d_state is None else d_state
        self._outer_products(d_from_states, self.q, d_by_readers[:-1])
        if self.num_chunks == 1:
            d_states = d_by_readers
            d_states[0].addcmul_(d_states[1], self.since_state[..., -1:, :])
            return d_states
        # Between all states, of which a row with index i reads those up to column i: [b * n_v, m + 1, m + 1].
        decays = decays_between(F.pad(self.log_since_start, (1, 0)))
        d_states = torch.empty_like(states)
        torch.bmm(decays.mT, self._by_head(d_by_readers), out=self._by_head(d_states))
        return d_states

    @staticmethod
    def _by_head(states: Tensor) -> Tensor:
        """View states ``[m, b, n_k, r, h_v, h_k]`` as ``[b * n_v, m, h_v * h_k]``."""
        heads = states.flatten(1, 3).flatten(2)  # [m, b * n_v, h_v * h_k]
        return heads.transpose(0, 1)

    @staticmethod
    def _outer_products(rows: Tensor, x: Tensor, states: Tensor) -> None:
        """Write the sum over positions of ``[n, n_k, c, r * h_v]`` times ``[n, n_k, 1, c, h_k]`` to m states."""
        rows = rows.flatten(0, 1)  # [n * n_k, c, r * h_v]
        x = x.flatten(0, 2)  # [n * n_k, c, h_k]
        matrices = states.flatten(0, 2).flatten(1, 2)  # [n * n_k, r * h_v, h_k]
        torch.bmm(rows.mT, x, out=matrices)

    def _read_states(self, x: Tensor, states: Tensor) -> Tensor:
        """Multiply ``[n, n_k, 1, c, h_k]`` by the states of the m chunks: ``[n, n_k, r, c, h_v]``."""
        products = x[:, :, 0] @ self._state_matrices(states).mT  # [n, n_k, c, r * h_v]
        by_value_head = products.unflatten(-1, states.shape[3:5])  # [n, n_k, c, r, h_v]
        return by_value_head.transpose(2, 3)

    @staticmethod
    def _sum_of_products(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        """Compute ``a @ b + c @ d`` of matrices ``[n, n_k, ...]`` in two launches."""
        total = (a @ b).flatten(0, 1)  # [n * n_k, ...]
        total.baddbmm_(c.flatten(0, 1), d.flatten(0, 1))
        return total.unflatten(0, a.shape[:2])

    @staticmethod
    def _scaled_rows(x: Tensor, factors: Tensor) -> Tensor:
        """Multiply ``[n, n_k, r, c, h_v]`` by factors of positions, and permute to ``[n, n_k, c, r * h_v]``."""
        rows = torch.empty_like(x.transpose(2, 3), memory_format=torch.contiguous_format)
        torch.mul(x, factors, out=rows.transpose(2, 3))
        return rows.flatten(-2)

    @staticmethod
    def _state_matrices(states: Tensor) -> Tensor:
        """View states ``[m, b, n_k, r, h_v, h_k]`` as ``[n, n_k, r * h_v, h_k]``."""
        return states.flatten(0, 1).flatten(2, 3)


_NO_LIMITS = (0.0, math.inf)  # of step sizes, which softplus makes positive
_KERNEL_CHUNK = 256  # positions per chunk of the kernel, as in the published models


@outside_graphs
def kernel_state_space(
    kernel: Callable[..., Tensor],
    c: Tensor,
    b: Tensor,
    x: Tensor,
    dt: Tensor,
    dt_bias: Tensor,
    dt_limits: tuple[float, float],
    a_log: Tensor,
    skip: Tensor,
    reach: Tensor,
) -> Tensor:
    """Compute :func:`state_space` and its skip connection by ``mamba_chunk_scan_combined`` of mamba-ssm.

    It takes step sizes before softplus, and computes what :class:`_StepSizes` computes.
    """
    step_sizes = {"dt_bias": dt_bias, "dt_softplus": True, "dt_limit": dt_limits}
    documents = index_documents(reach, len(x))
    rate = -a_log.float().exp()  # logarithm of the decay per step size
    return kernel(x, dt, rate, b, c, _KERNEL_CHUNK, D=skip, seq_idx=documents, **step_sizes)


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
        ``[b, groups, heads / groups, p, n]``, without a gradient.
    """
    return _rule(c, b, x, g, dt, resets, state)


class _StepSizes(torch.autograd.Function):
    """Step sizes and logarithms of the decays, float32 ``[b, s, heads]`` each, from the projection of the input.

    The step size is ``softplus(scale * dt + dt_bias)``, clamped to ``limits``, and the decay is
    ``exp(-exp(a_log) * step size)``.
    """

    @staticmethod
    def forward(
        ctx, dt: Tensor, dt_bias: Tensor, a_log: Tensor, scale: float, limits: tuple[float, float]
    ) -> tuple[Tensor, Tensor]:
        before_softplus = torch.add(dt_bias.float(), dt, alpha=scale)
        step_sizes = F.softplus(before_softplus)
        if limits != _NO_LIMITS:
            step_sizes = F.hardtanh(step_sizes, *limits)  # which clamps, and has a backward pass of one operator
        rate = -a_log.float().exp()
        log_decays = step_sizes * rate
        ctx.save_for_backward(before_softplus, step_sizes, log_decays, rate)
        ctx.scale = scale
        ctx.limits = limits
        ctx.dtypes = dt.dtype, dt_bias.dtype, a_log.dtype
        return step_sizes, log_decays

    @staticmethod
    def backward(ctx, d_step_sizes: Tensor, d_log_decays: Tensor) -> tuple[Tensor | None, ...]:
        before_softplus, step_sizes, log_decays, rate = ctx.saved_tensors
        dt_dtype, dt_bias_dtype, a_log_dtype = ctx.dtypes
        needs_parameters = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        if needs_parameters:
            # Of a_log and dt_bias at each position, side by side, so that both sums are one operator: [2, b, s, heads].
            d_parameters = torch.empty(2, *log_decays.shape, dtype=torch.float32, device=log_decays.device)
            torch.mul(d_log_decays, log_decays, out=d_parameters[0])  # of a_log: a log_decay is -exp(a_log) * step size
            d_before_softplus = d_parameters[1]  # of dt_bias, too; written below
        else:
            d_before_softplus = torch.empty(log_decays.shape, dtype=dt_dtype, device=log_decays.device)
        d_softplus = torch.addcmul(d_step_sizes, d_log_decays, rate)
        if ctx.limits != _NO_LIMITS:
            # The clamped step sizes are enough: those at a limit have no gradient.
            d_softplus = torch.ops.aten.hardtanh_backward(d_softplus, step_sizes, *ctx.limits)
        # 1 and 20: the defaults of softplus, which is the identity above 20.
        torch.ops.aten.softplus_backward.grad_input(d_softplus, before_softplus, 1, 20, grad_input=d_before_softplus)
        d_a_log = None
        d_dt_bias = None
        if needs_parameters:
            parameter_dtype = torch.promote_types(a_log_dtype, dt_bias_dtype)
            d_a_log, d_dt_bias = d_parameters.sum((1, 2)).to(parameter_dtype)  # [heads] each
        if ctx.scale != 1.0:
            d_before_softplus = d_before_softplus * ctx.scale
        return d_before_softplus.to(dt_dtype), d_dt_bias, d_a_log, None, None


class _SkipConnection(torch.autograd.Function):
    """``out + skip * x`` for ``[b, s, heads, p]`` and a factor per head, whose backward pass multiplies once each."""

    @staticmethod
    def forward(ctx, out: Tensor, x: Tensor, skip: Tensor) -> Tensor:
        ctx.save_for_backward(x, skip)
        return torch.addcmul(out, x, skip[:, None])

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, skip = ctx.saved_tensors
        d_skip = None
        if ctx.needs_input_grad[2]:
            d_skip = (grad * x).sum((0, 1, 3))  # [heads]
        return grad, grad * skip[:, None], d_skip


class _GatedNorm(torch.autograd.Function):
    """Gated norm that saves only its arguments for the backward pass, instead of five float32 tensors of that size."""

    @staticmethod
    def forward(ctx, x: Tensor, gate: Tensor, scale: Tensor, groups: int, eps: float) -> Tensor:
        gated = (x * F.silu(gate.float())).unflatten(-1, (groups, -1))  # float32 [..., groups, dim / groups]
        normed, rstd = normalize(gated, eps)
        ctx.save_for_backward(x, gate, scale, rstd)
        ctx.groups = groups
        return torch.mul(normed.flatten(-2), scale, out=torch.empty_like(x))  # rounded once

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, scale, rstd = ctx.saved_tensors
        # The forward pass again, in float32.
        gate_float = gate.float()
        silu = F.silu(gate_float)
        gated = (x * silu).unflatten(-1, (ctx.groups, -1))  # [..., groups, dim / groups]

        d_scale = None
        if ctx.groups == 1 and x.is_cuda:
            # Norm and scale have one operator on CUDA, if both are over all channels. Its arguments are of one dtype.
            d_scaled = grad.float().unsqueeze(-2)  # [..., 1, dim]
            needed = [True, ctx.needs_input_grad[2]]
            d_gated, d_scale = torch.ops.aten._fused_rms_norm_backward(
                d_scaled, gated, gated.shape[-1:], rstd, scale.float(), needed
            )
        else:
            if ctx.needs_input_grad[2]:
                normed = (gated * rstd).flatten(-2)
                d_scale = normed.mul_(grad).flatten(0, -2).sum(0)  # [dim]
            d_normed = (grad * scale.float()).unflatten(-1, (ctx.groups, -1))
            d_gated = normalize_backward(d_normed, gated, rstd)
        d_gated = d_gated.flatten(-2)
        d_x = torch.mul(d_gated, silu, out=torch.empty_like(x))
        d_gate = torch.empty_like(gate)
        d_silu = d_gated.mul_(x)
        torch.ops.aten.silu_backward.grad_input(d_silu, gate_float, grad_input=d_gate)
        if d_scale is not None:
            d_scale = d_scale.to(scale.dtype)
        return d_x, d_gate, d_scale, None, None


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
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            return _GatedNorm.apply(x, gate, self.scale, self.groups, self.eps)
        # The compiler fuses these operators, and chooses the saved tensors.
        gated = (x * F.silu(gate.float())).unflatten(-1, (self.groups, -1))  # float32 [..., groups, dim / groups]
        normed = F.rms_norm(gated, gated.shape[-1:], eps=self.eps).flatten(-2)
        return (normed * self.scale).to(x.dtype)


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
        self.in_proj = nn.Linear(embed_dim, inner + sum(self.widths) + num_heads, bias=False)  # z; x, b and c; dt
        self.conv = DepthwiseWeight(sum(self.widths), conv_taps, bias=True)
        self.a_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads))
        self.skip = nn.Parameter(torch.empty(num_heads))
        self.norm = GatedGroupNorm(inner, num_groups, norm_eps) if has_norm else None
        self.output_proj = nn.Linear(inner, embed_dim, bias=False)
        self.kernel: Callable[..., Any] | None = None  # set by choose_kernels, when device and dtype are known
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize exp(a_log) uniform in [1, 16], softplus(dt_bias) log-uniform in [0.001, 0.1], ``skip`` to 1."""
        with torch.no_grad():
            self.a_log.uniform_(1.0, 16.0).log_()
            step_sizes = self.dt_bias.uniform_(math.log(0.001), math.log(0.1)).exp_()
            step_sizes.expm1_().log_()  # in place: the inverse of softplus
            self.skip.fill_(1.0)

    def choose_kernels(self, device: torch.device, dtype: torch.dtype) -> None:
        """See the base class."""
        self.kernel = STATE_SPACE.choose("Mamba 2", device, dtype, state_dim=self.state_dim)

    @property
    def conv_gap(self) -> int:
        """See the base class."""
        return self.conv.gap

    def _new_cache(self, batch_size: int, dtype: torch.dtype) -> StateCache:
        heads_per_group = self.num_heads // self.num_groups
        state = (batch_size, self.num_groups, heads_per_group, self.head_dim, self.state_dim)
        conv_inputs = (batch_size, self.conv.weight.shape[-1] - 1, sum(self.widths))
        return StateCache(state, conv_inputs, dtype)

    def _mix(
        self, x: Tensor, reach: Tensor, cache: StateCache | None, documents: Documents | Boundaries | None
    ) -> Tensor:
        gate_scale, *conv_scales, dt_scale = self.scales
        projected_widths = (self.widths[0], sum(self.widths), self.num_heads)
        gate, mixed, dt = self.in_proj(x).split(projected_widths, dim=-1)
        factors = None  # the convolution multiplies its weight by them, which is cheaper than its inputs
        if set(conv_scales) != {1.0}:
            factors = list(zip(self.widths, conv_scales, strict=True))
        share = self.share
        per_head = ((self.num_heads, 1),)
        blocks = (
            (self.num_heads, self.head_dim),
            (self.num_groups, self.state_dim),
            (self.num_groups, self.state_dim),
        )
        # Convolution and scan run along positions: with context parallelism, this rank gets all positions of some
        # heads. The gate works position by position, so that it stays as it is.
        (mixed, dt), reach = share.gather_positions((mixed, dt), (blocks, per_head), reach)
        mixed = self.conv(mixed, reach, cache, factors, silu=True, share=share, blocks=blocks, documents=documents)
        local_widths = [share.num_heads(heads) * head_dim for heads, head_dim in blocks]
        x, b, c = mixed.split(local_widths, dim=-1)
        x = x.unflatten(-1, (-1, self.head_dim))  # [b, s, heads, p]
        b = b.unflatten(-1, (-1, self.state_dim))  # [b, s, groups, n]
        c = c.unflatten(-1, (-1, self.state_dim))  # [b, s, groups, n]
        dt_bias = share.local_channels(self.dt_bias, per_head)
        a_log = share.local_channels(self.a_log, per_head)
        skip = share.local_channels(self.skip, per_head)
        if self.kernel is not None and cache is None:  # the kernel neither takes nor returns a cached state
            if dt_scale != 1.0:  # it has no argument for the factor
                dt = dt.float() * dt_scale
            out = kernel_state_space(self.kernel, c, b, x, dt, dt_bias, self.dt_limits, a_log, skip, reach)
        else:
            state = None
            if cache is not None:
                rows = cache.rows(x.shape[0])
                state = cache.state[rows]
            step_sizes, log_decays = _StepSizes.apply(dt, dt_bias, a_log, dt_scale, self.dt_limits)
            out, state = state_space(c, b, x, log_decays, step_sizes, reach == 0, state)
            if cache is not None:
                cache.state[rows] = state
            out = _SkipConnection.apply(out, x, skip)
        out = share.scatter_positions(out).flatten(-2)  # [b, s, heads * p], of this rank's positions, as the gate
        if gate_scale != 1.0:
            gate = gate * gate_scale
        if self.norm is None:
            gated = swiglu(gate, out)
        else:
            gated = self.norm(out, gate)
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
