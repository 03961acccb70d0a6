"""Older name of the chunked cross entropy, for existing configs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchtune.modules.loss.cross_entropy_loss import LinearCrossEntropyLoss
from torchtune.utils import deprecated


@deprecated("Use torchtune.modules.loss.LinearCrossEntropyLoss instead.")
class CEWithChunkedOutputLoss(LinearCrossEntropyLoss):
    """Older name of :class:`LinearCrossEntropyLoss`; also accepts chunks of logits.

    Args:
        num_output_chunks: number of chunks.
        ignore_index: label of ignored tokens.

    Example:
        >>> from torchtune.modules.loss import CEWithChunkedOutputLoss
        >>> loss = CEWithChunkedOutputLoss(num_output_chunks=2)
        >>> loss([torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)], torch.tensor([[0, 1, 2, -100]])).item()  # log(4)
        1.3862...
    """

    def __init__(self, num_output_chunks: int = 8, ignore_index: int = -100) -> None:
        super().__init__(num_output_chunks=num_output_chunks, ignore_index=ignore_index)

    sum_and_count = LinearCrossEntropyLoss.sum_and_count  # setup_loss must not derive it from forward

    def forward(self, outputs: Tensor | Sequence[Tensor], targets: Tensor) -> Tensor:
        """Compute the mean loss over labeled tokens, 0 if there are none.

        Args:
            outputs: hidden states [b, s, d] after ``set_model_output(model)``, or chunks of logits along the
                sequence, each [b, s / chunks, v].
            targets: labels int64 [b, s], already shifted.

        Returns:
            Scalar, float32 (float64 for float64 inputs).
        """
        if isinstance(outputs, Tensor):
            return super().forward(outputs, targets)
        lengths = [chunk.shape[1] for chunk in outputs]
        chunks = zip(outputs, targets.split(lengths, dim=1), strict=True)
        total = sum(self._sum_of_logits(logits.flatten(0, 1), target.flatten()) for logits, target in chunks)
        count = (targets != self.ignore_index).sum()
        return total / count.clamp(min=1)

    def _sum_of_logits(self, logits: Tensor, target: Tensor) -> Tensor:
        """logits [n, v], target [n] -> scalar."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return torch.nn.functional.cross_entropy(logits, target, ignore_index=self.ignore_index, reduction="sum")
