"""Losses for fine-tuning and distillation."""

from torchtune._lazy import former_names
from torchtune.modules.loss.chunked_logits import linear_log_probs, token_log_probs
from torchtune.modules.loss.cross_entropy import CEWithChunkedOutputLoss, ClassificationLoss, LinearCrossEntropyLoss
from torchtune.modules.loss.custom_loss import LossError, RLLoss, SFTLoss, TokenLoss, setup_loss
from torchtune.modules.loss.distillation import (
    DivergenceLoss,
    ForwardKLLoss,
    ForwardKLWithChunkedOutputLoss,
    GeneralizedJSDLoss,
    LikeliestTokens,
    ReverseKLLoss,
    ReverseKLWithChunkedOutputLoss,
    SymmetricKLLoss,
    SymmetricKLWithChunkedOutputLoss,
    TeacherOutputs,
    TeacherStates,
)

__all__ = [
    "CEWithChunkedOutputLoss",
    "ClassificationLoss",
    "DivergenceLoss",
    "ForwardKLLoss",
    "ForwardKLWithChunkedOutputLoss",
    "GeneralizedJSDLoss",
    "LikeliestTokens",
    "LinearCrossEntropyLoss",
    "LossError",
    "RLLoss",
    "ReverseKLLoss",
    "ReverseKLWithChunkedOutputLoss",
    "SFTLoss",
    "SymmetricKLLoss",
    "SymmetricKLWithChunkedOutputLoss",
    "TeacherOutputs",
    "TeacherStates",
    "TokenLoss",
    "linear_log_probs",
    "setup_loss",
    "token_log_probs",
]

from torchtune.modules.loss.cross_entropy import LOGITS_BLOCK as LOGITS_BLOCK
from torchtune.modules.loss.custom_loss import Projection as Projection
from torchtune.modules.loss.custom_loss import check_causal as check_causal
from torchtune.modules.loss.custom_loss import innermost_loss as innermost_loss

__getattr__ = former_names(__name__)
