"""Sequence mixers other than attention: linear attention, state-space models and short convolutions."""

from torchtune.modules.mixers._gated_delta_net import GatedDeltaNet
from torchtune.modules.mixers._mamba2 import Mamba2
from torchtune.modules.mixers._mixer import RecurrentMixer, StateCache
from torchtune.modules.mixers._short_conv import ShortConv

__all__ = ["GatedDeltaNet", "Mamba2", "RecurrentMixer", "ShortConv", "StateCache"]

from torchtune.modules.mixers._mixer import Blocks as Blocks
from torchtune.modules.mixers._mixer import MixerShare as MixerShare
