"""Losses for fine-tuning and distillation."""

from torchtune._lazy import former_names
from torchtune.modules.loss._custom_loss import LossError, TokenLoss, setup_loss
from torchtune.modules.loss._log_probs import linear_log_probs, token_log_probs
from torchtune.modules.loss.ce_chunked_output_loss import CEWithChunkedOutputLoss
from torchtune.modules.loss.cross_entropy_loss import LinearCrossEntropyLoss
from torchtune.modules.loss.kd_losses import (
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
from torchtune.modules.loss.loss_types import RLLoss, SFTLoss, keep_row_losses

__all__ = [
    "CEWithChunkedOutputLoss",
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
    "keep_row_losses",
    "linear_log_probs",
    "setup_loss",
    "token_log_probs",
]

from torchtune.modules.loss._chunked_logits import Projection as Projection
from torchtune.modules.loss.cross_entropy_loss import LOGITS_BLOCK as LOGITS_BLOCK

__getattr__ = former_names(__name__)
