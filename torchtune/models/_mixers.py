"""Settings and weight names of mixers that replace attention in some layers."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

# Weight names: (Hugging Face name in a layer, our name in the mixer, optional op that reorders rows).
Names = tuple[tuple[Any, ...], ...]


class Mixer:
    """Base class of the sizes of a mixer, which replaces or accompanies attention in some layers of a model.

    A subclass is a frozen dataclass with a method ``build``.

    Attributes:
        has_norm: whether the mixer has a norm inside.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Projection(torchtune.models.Mixer):
        ...     def build(self, embed_dim, norm_eps):
        ...         return torch.nn.Linear(embed_dim, embed_dim)
        >>> Projection().build(4, 1e-5)
        Linear(in_features=4, out_features=4, bias=True)
    """

    has_norm: bool = True

    def problem(self) -> str | None:
        """Return an error message if the sizes are invalid, otherwise None."""
        return None

    def build(self, embed_dim: int, norm_eps: float) -> nn.Module:
        """Build the module of one layer."""
        raise NotImplementedError(f"{type(self).__name__} has no method build.")


@dataclass(frozen=True, kw_only=True)
class DeltaNetMixer(Mixer):
    """Settings of :class:`torchtune.modules.mixers.GatedDeltaNet`.

    Attributes:
        num_key_heads: number of query and key heads.
        num_value_heads: number of value heads, a multiple of ``num_key_heads``.
        key_dim: size of a query or key head.
        value_dim: size of a value head.
        conv_taps: kernel size of the convolution.
        fused: use two fused projections: one for queries, keys, values and gates, and one for beta and decay.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_taps: int = 4
    fused: bool = False
    names: ClassVar[Names] = (
        ("linear_attn.in_proj_qkv.weight", "qkv_proj.weight"),
        ("linear_attn.in_proj_z.weight", "z_proj.weight"),
        ("linear_attn.in_proj_b.weight", "b_proj.weight"),
        ("linear_attn.in_proj_a.weight", "a_proj.weight"),
        ("linear_attn.conv1d.weight", "conv.weight"),
        ("linear_attn.A_log", "a_log"),
        ("linear_attn.dt_bias", "dt_bias"),
        ("linear_attn.norm.weight", "norm.scale"),
        ("linear_attn.out_proj.weight", "output_proj.weight"),
    )

    def problem(self) -> str | None:
        """Return an error message if the settings are invalid, otherwise None."""
        sizes = (self.num_key_heads, self.num_value_heads, self.key_dim, self.value_dim, self.conv_taps)
        if min(sizes) < 1:
            return f"the sizes of linear attention must be at least 1, got {self}"
        if self.num_value_heads % self.num_key_heads:
            return (
                f"num_value_heads ({self.num_value_heads}) must be a multiple of num_key_heads ({self.num_key_heads})"
            )
        return None

    @property
    def group_dim(self) -> int:
        """Total width of the value heads that share a key head."""
        return self.group_heads * self.value_dim

    @property
    def group_heads(self) -> int:
        """Number of value heads that share a key head."""
        return self.num_value_heads // self.num_key_heads

    def build(self, embed_dim: int, norm_eps: float) -> nn.Module:
        """Build the module of one layer."""
        from torchtune.modules.mixers import GatedDeltaNet

        return GatedDeltaNet(embed_dim=embed_dim, norm_eps=norm_eps, **vars(self))


@dataclass(frozen=True, kw_only=True)
class ShortConvMixer(Mixer):
    """Settings of :class:`torchtune.modules.mixers.ShortConv`.

    Attributes:
        conv_taps: kernel size of the convolution.
    """

    conv_taps: int = 3
    names: ClassVar[Names] = (
        ("conv.in_proj.weight", "in_proj.weight"),
        ("conv.conv.weight", "conv.weight"),
        ("conv.out_proj.weight", "output_proj.weight"),
    )

    def problem(self) -> str | None:
        """Return an error message if the settings are invalid, otherwise None."""
        if self.conv_taps < 1:
            return f"conv_taps must be at least 1, got {self.conv_taps}"
        return None

    def build(self, embed_dim: int, norm_eps: float) -> nn.Module:
        """Build the module of one layer."""
        from torchtune.modules.mixers import ShortConv

        return ShortConv(embed_dim=embed_dim, conv_taps=self.conv_taps)


@dataclass(frozen=True, kw_only=True)
class Mamba2Mixer(Mixer):
    """Settings of :class:`torchtune.modules.mixers.Mamba2`.

    Attributes:
        num_heads: number of heads.
        head_dim: size of a head.
        num_groups: number of groups of heads; divides ``num_heads``.
        state_dim: state size; a head's state is ``[state_dim, head_dim]``.
        conv_taps: kernel size of the convolution.
        has_norm: whether the gated output is normalized.
        dt_min: minimum step size.
        dt_max: maximum step size.
        scales: factors of z, x, b, c and dt.
        out_scale: factor of the output.
    """

    num_heads: int
    head_dim: int
    num_groups: int = 1
    state_dim: int = 128
    conv_taps: int = 4
    has_norm: bool = True
    dt_min: float = 0.0
    dt_max: float = math.inf
    scales: tuple[float, ...] = (1.0,) * 5
    out_scale: float = 1.0
    names: ClassVar[Names] = (
        ("mamba.in_proj.weight", "in_proj.weight"),
        ("mamba.conv1d.weight", "conv.weight"),
        ("mamba.conv1d.bias", "conv.bias"),
        ("mamba.A_log", "a_log"),
        ("mamba.dt_bias", "dt_bias"),
        ("mamba.D", "skip"),
        ("mamba.norm.weight", "norm.scale"),
        ("mamba.out_proj.weight", "output_proj.weight"),
    )

    def problem(self) -> str | None:
        """Return an error message if the settings are invalid, otherwise None."""
        if min(self.num_heads, self.head_dim, self.num_groups, self.state_dim, self.conv_taps) < 1:
            return f"the sizes of Mamba must be at least 1, got {self}"
        if self.num_heads % self.num_groups:
            return f"num_heads ({self.num_heads}) must be a multiple of num_groups ({self.num_groups})"
        return None

    def build(self, embed_dim: int, norm_eps: float) -> nn.Module:
        """Build the module of one layer."""
        from torchtune.modules.mixers import Mamba2

        return Mamba2(embed_dim=embed_dim, norm_eps=norm_eps, **vars(self))
