"""The older name of the chunked cross entropy, kept for configs that use it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchtune.modules.loss.cross_entropy_loss import LinearCrossEntropyLoss
from torchtune.utils import deprecated


@deprecated("Use torchtune.modules.loss.LinearCrossEntropyLoss instead.")
class CEWithChunkedOutputLoss(LinearCrossEntropyLoss):
    """:class:`LinearCrossEntropyLoss` under its older name; also takes logits in chunks.

    Args:
        num_output_chunks: number of chunks.
        ignore_index: label of positions without a label.

    Example:
        >>> from torchtune.modules.loss import CEWithChunkedOutputLoss
        >>> loss = CEWithChunkedOutputLoss(num_output_chunks=2)
        >>> loss([torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)], torch.tensor([[0, 1, 2, -100]])).item()  # log(4)
        1.3862...
    """

    def __init__(self, num_output_chunks: int = 8, ignore_index: int = -100) -> None:
        super().__init__(num_output_chunks=num_output_chunks, ignore_index=ignore_index)

    sum_and_count = LinearCrossEntropyLoss.sum_and_count  # what this forward computes of hidden states

    def forward(self, outputs: Tensor | Sequence[Tensor], targets: Tensor) -> Tensor:
        """Mean loss over positions with a label, 0 where there is none.

        Args:
            outputs: hidden states [b, s, d] after ``set_model_output(model)``, or chunks of logits along the
                sequence, each [b, s / chunks, v].
            targets: labels int64 [b, s], already shifted.

        Returns:
            scalar, float32 (float64 for float64 inputs).
        """
        if isinstance(outputs, Tensor):
            return super().forward(outputs, targets)
        parts = zip(outputs, targets.split([chunk.shape[1] for chunk in outputs], dim=1), strict=True)
        total = sum(self._sum_of_logits(logits.flatten(0, 1), target.flatten()) for logits, target in parts)
        return total / (targets != self.ignore_index).sum().clamp(min=1)

    def _sum_of_logits(self, logits: Tensor, target: Tensor) -> Tensor:
        """Summed cross entropy: logits [n, v], target [n] -> scalar."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return torch.nn.functional.cross_entropy(logits, target, ignore_index=self.ignore_index, reduction="sum")
