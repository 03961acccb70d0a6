"""Mixtures of experts."""

from torchtune.modules.moe.experts import GroupedExperts
from torchtune.modules.moe.moe import MoE, TokenChoiceTopKRouter

__all__ = ["GroupedExperts", "MoE", "TokenChoiceTopKRouter"]
