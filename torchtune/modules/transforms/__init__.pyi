from torchtune.data import Transform as Transform

from ._transforms import VisionCrossAttentionMask as VisionCrossAttentionMask
