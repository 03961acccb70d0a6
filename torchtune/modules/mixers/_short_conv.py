"""Gated short convolution of LFM2."""

import torch
from torch import Tensor, nn

from torchtune.modules.mixers._causal_conv import DepthwiseWeight
from torchtune.modules.mixers._mixer import RecurrentMixer
from torchtune.modules.mixers._state_cache import StateCache


class ShortConv(RecurrentMixer):
    """Gated short convolution ``output_proj(c * conv(b * x))``, where b, c and x are projections of the input.

    Args:
        embed_dim: width d of the hidden states.
        conv_taps: kernel size of the convolution.

    Example:
        >>> mixer = torchtune.modules.mixers.ShortConv(embed_dim=8, conv_taps=3)
        >>> mixer(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    def __init__(self, *, embed_dim: int, conv_taps: int) -> None:
        super().__init__()
        self.in_proj = nn.Linear(embed_dim, 3 * embed_dim, bias=False)
        self.conv = DepthwiseWeight(embed_dim, conv_taps)
        self.output_proj = nn.Linear(embed_dim, embed_dim, bias=False)

    def _new_cache(self, batch_size: int, dtype: torch.dtype) -> StateCache:
        channels, _, taps = self.conv.weight.shape
        return StateCache((0,), (batch_size, taps - 1, channels), dtype)

    def _mix(self, x: Tensor, reach: Tensor, cache: StateCache | None) -> Tensor:
        before, after, inner = self.in_proj(x).chunk(3, dim=-1)
        return self.output_proj(after * self.conv(before * inner, reach, cache))
