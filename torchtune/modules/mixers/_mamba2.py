"""Mamba 2: the state-space model of Granite 4, Falcon-H1 and Nemotron 3."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtune.modules.feed_forward import swiglu
from torchtune.modules.kernels import STATE_SPACE, KernelUser
from torchtune.modules.mixers._causal_conv import DepthwiseWeight
from torchtune.modules.mixers._gated_norm import GatedGroupNorm
from torchtune.modules.mixers._mixer import RecurrentMixer
from torchtune.modules.mixers._state_cache import StateCache
from torchtune.modules.mixers._state_space import kernel_state_space, state_space


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
        self.num_heads, self.head_dim, self.num_groups, self.state_dim = num_heads, head_dim, num_groups, state_dim
        self.dt_limits, self.scales, self.out_scale = (dt_min, dt_max), scales, out_scale
        inner, of_groups = num_heads * head_dim, num_groups * state_dim
        self.widths = (inner, of_groups, of_groups)
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
        shared = self.num_heads // self.num_groups
        state = (batch_size, self.num_groups, self.state_dim, shared, self.head_dim)
        return StateCache(state, (batch_size, self.conv.weight.shape[-1] - 1, sum(self.widths)), dtype)

    def _mix(self, x: Tensor, reach: Tensor, cache: StateCache | None) -> Tensor:
        gate_scale, *conv_scales, dt_scale = self.scales
        gate, mixed, dt = self.in_proj(x).split((self.widths[0], sum(self.widths), self.num_heads), dim=-1)
        factors = None
        if set(conv_scales) != {1.0}:
            factors = list(zip(self.widths, conv_scales, strict=True))
        mixed = self.conv(mixed, reach, cache, factors, silu=True)
        x, b, c = mixed.split(self.widths, dim=-1)
        x = x.unflatten(-1, (-1, self.head_dim))  # [b, s, heads, p]
        b = b.unflatten(-1, (self.num_groups, -1))  # [b, s, groups, n]
        c = c.unflatten(-1, (self.num_groups, -1))
        dt = F.softplus(dt.float() * dt_scale + self.dt_bias).clamp(*self.dt_limits)
        rate = -self.a_log.float().exp()
        if self.kernel is not None and cache is None:
            out = kernel_state_space(self.kernel, c, b, x, rate, dt, self.skip, reach).flatten(-2)
        else:
            rows = None if cache is None else cache.rows(x.shape[0])
            state = None if cache is None else cache.state[rows]
            out, state = state_space(c, b, x, rate * dt, dt, reach == 0, state)
            if cache is not None:
                cache.state[rows] = state
            out = torch.addcmul(out, x, self.skip[:, None]).flatten(-2)
        gate = gate if gate_scale == 1.0 else gate * gate_scale
        out = self.output_proj(swiglu(gate, out) if self.norm is None else self.norm(out, gate))
        return out if self.out_scale == 1.0 else out * self.out_scale

    @property
    def state_elements(self) -> int:
        """Number of elements of one sequence's state, ``heads * n * p``."""
        return self.num_heads * self.state_dim * self.head_dim
