"""Losses of fine-tuning and distillation."""

from torchtune.modules.loss.ce_chunked_output_loss import CEWithChunkedOutputLoss
from torchtune.modules.loss.cross_entropy_loss import LinearCrossEntropyLoss
from torchtune.modules.loss.kd_losses import (
    ForwardKLLoss,
    ForwardKLWithChunkedOutputLoss,
    ReverseKLLoss,
    ReverseKLWithChunkedOutputLoss,
    SymmetricKLLoss,
    SymmetricKLWithChunkedOutputLoss,
)
from torchtune.modules.loss.loss_types import RLLoss, SFTLoss

__all__ = [
    "CEWithChunkedOutputLoss",
    "ForwardKLLoss",
    "ForwardKLWithChunkedOutputLoss",
    "LinearCrossEntropyLoss",
    "RLLoss",
    "ReverseKLLoss",
    "ReverseKLWithChunkedOutputLoss",
    "SFTLoss",
    "SymmetricKLLoss",
    "SymmetricKLWithChunkedOutputLoss",
]
