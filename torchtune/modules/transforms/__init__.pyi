from torchtune.data import Transform as Transform

from .vision import VisionCrossAttentionMask as VisionCrossAttentionMask
