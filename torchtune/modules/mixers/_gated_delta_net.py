"""Gated DeltaNet: the linear attention of Qwen 3.5 and Qwen3-Next."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtune.data import Documents
from torchtune.modules._document_attention import Boundaries
from torchtune.modules.kernels import DELTA_RULE, KernelUser
from torchtune.modules.mixers._causal_conv import DepthwiseWeight
from torchtune.modules.mixers._delta_rule import KERNEL_CHUNK, gated_delta_rule, kernel_delta_rule
from torchtune.modules.mixers._mixer import RecurrentMixer
from torchtune.modules.mixers._state_cache import StateCache
from torchtune.modules.rms_norm import rms_norm


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
        return (normed.float() * F.silu(gate.float())).to(x.dtype)


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
        self.num_key_heads, self.num_value_heads = num_key_heads, num_value_heads
        self.key_dim, self.value_dim = key_dim, value_dim
        self.widths = (num_key_heads * key_dim, num_key_heads * key_dim, num_value_heads * value_dim)
        self.fused = fused
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
        self.kernel: Callable[..., Any] | None = None
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

    def _new_cache(self, batch_size: int, dtype: torch.dtype) -> StateCache:
        shared = self.num_value_heads // self.num_key_heads
        state = (batch_size, self.num_key_heads, shared, self.key_dim, self.value_dim)
        return StateCache(state, (batch_size, self.conv.weight.shape[-1] - 1, sum(self.widths)), dtype)

    def _mix(self, x: Tensor, reach: Tensor, cache: StateCache | None) -> Tensor:
        return self._mix_documents(x, reach, cache, None)

    def _mix_documents(
        self, x: Tensor, reach: Tensor, cache: StateCache | None, documents: Documents | Boundaries | None
    ) -> Tensor:
        qkv, z, b, a = self._projected(x)
        mixed = self.conv(qkv, reach, cache, silu=True)
        q, k, v = (
            t.unflatten(-1, (-1, size)) for t, size in zip(mixed.split(self.widths, -1), self._sizes, strict=True)
        )
        decay = -self.a_log.float().exp() * F.softplus(a.float() + self.dt_bias)
        if self.kernel is not None and documents is not None and cache is None:
            boundaries = documents
            if isinstance(documents, Documents):
                boundaries = Boundaries.of(documents, kernel_chunk=KERNEL_CHUNK)
            lengths = boundaries.cu_seqlens, boundaries.kernel_chunks
            out = kernel_delta_rule(self.kernel, q, k, v, decay, b.sigmoid(), *lengths)
        else:
            state = None if cache is None else cache.state[cache.rows(x.shape[0])]
            out, state = gated_delta_rule(q, k, v, decay, b.sigmoid(), reach == 0, state)
            if cache is not None:
                cache.state[cache.rows(x.shape[0])] = state
        gate = z.unflatten(-1, (-1, self.value_dim))
        return self.output_proj(self.norm(out, gate).flatten(-2))

    def _projected(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the input projections: concatenated queries, keys and values; gate z; b for beta; a for decay."""
        if not self.fused:
            return self.qkv_proj(x), self.z_proj(x), self.b_proj(x), self.a_proj(x)
        qkv, z = self.qkvz_proj(x).split((sum(self.widths), self.widths[2]), dim=-1)
        return qkv, z, *self.ba_proj(x).chunk(2, dim=-1)

    @property
    def state_elements(self) -> int:
        """Number of elements of one sequence's state, ``n_v * h_k * h_v``."""
        return self.num_value_heads * self.key_dim * self.value_dim

    @property
    def _sizes(self) -> tuple[int, int, int]:
        return self.key_dim, self.key_dim, self.value_dim
