"""Losses of post-training: preferences, rewards, proximal policy optimisation."""

from torchtune.rlhf.loss._base import AnswerLoss, document_log_probs, setup_loss
from torchtune.rlhf.loss.dpo import (
    CPOLoss,
    DPOLoss,
    HingeLoss,
    IPOLoss,
    ORPOLoss,
    PreferenceLoss,
    RobustDPOLoss,
    RSOLoss,
    SigmoidNormLoss,
    SimPOLoss,
)
from torchtune.rlhf.loss.kto import KTOLoss
from torchtune.rlhf.loss.ppo import PPOLoss
from torchtune.rlhf.loss.reward import RewardLoss, pooled_scores

__all__ = [
    "AnswerLoss",
    "CPOLoss",
    "DPOLoss",
    "HingeLoss",
    "IPOLoss",
    "KTOLoss",
    "ORPOLoss",
    "PPOLoss",
    "PreferenceLoss",
    "RSOLoss",
    "RewardLoss",
    "RobustDPOLoss",
    "SigmoidNormLoss",
    "SimPOLoss",
    "document_log_probs",
    "pooled_scores",
    "setup_loss",
]
