"""Mixers of positions that are not attention: linear attention and short convolutions."""

from torchtune.modules.mixers._gated_delta_net import GatedDeltaNet
from torchtune.modules.mixers._mixer import RecurrentMixer
from torchtune.modules.mixers._short_conv import ShortConv
from torchtune.modules.mixers._state_cache import StateCache

__all__ = ["GatedDeltaNet", "RecurrentMixer", "ShortConv", "StateCache"]
