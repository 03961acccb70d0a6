"""Post-training losses: preferences, rewards, GRPO and PPO."""

from torchtune.rlhf.loss._base import AnswerLoss, document_log_probs, setup_loss
from torchtune.rlhf.loss.dpo import (
    APODownLoss,
    APOZeroLoss,
    BCOPairLoss,
    ChosenNLLLoss,
    CPOLoss,
    DPOLoss,
    HingeLoss,
    IPOLoss,
    MixedPreferenceLoss,
    ORPOLoss,
    PreferenceLoss,
    RobustDPOLoss,
    RSOLoss,
    SigmoidNormLoss,
    SimPOLoss,
)
from torchtune.rlhf.loss.embedding import InfoNCELoss
from torchtune.rlhf.loss.grpo import (
    CISPOLoss,
    DAPOLoss,
    DrGRPOLoss,
    GRPOLoss,
    GSPOLoss,
    OnPolicyDistillationLoss,
    RLOOLoss,
)
from torchtune.rlhf.loss.kto import KTOLoss
from torchtune.rlhf.loss.ppo import PPOLoss
from torchtune.rlhf.loss.reranking import RerankBCELoss, RerankListwiseLoss, RerankLoss
from torchtune.rlhf.loss.reward import RewardLoss, pooled_scores

__all__ = [
    "APODownLoss",
    "APOZeroLoss",
    "AnswerLoss",
    "BCOPairLoss",
    "CISPOLoss",
    "CPOLoss",
    "ChosenNLLLoss",
    "DAPOLoss",
    "DPOLoss",
    "DrGRPOLoss",
    "GRPOLoss",
    "GSPOLoss",
    "HingeLoss",
    "IPOLoss",
    "InfoNCELoss",
    "KTOLoss",
    "MixedPreferenceLoss",
    "ORPOLoss",
    "OnPolicyDistillationLoss",
    "PPOLoss",
    "PreferenceLoss",
    "RLOOLoss",
    "RSOLoss",
    "RerankBCELoss",
    "RerankListwiseLoss",
    "RerankLoss",
    "RewardLoss",
    "RobustDPOLoss",
    "SigmoidNormLoss",
    "SimPOLoss",
    "document_log_probs",
    "pooled_scores",
    "setup_loss",
]
