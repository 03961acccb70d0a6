"""Loss of models with a classification head."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtune.data import label_index
from torchtune.modules.loss.custom_loss import LossError, Projection, SFTLoss

# Problem type -> (logits [n, c], targets [n, c] or [n, 1]) -> losses [n].
_LOSSES = {
    "single_label_classification": lambda logits, targets: F.cross_entropy(
        logits, targets.squeeze(-1).long(), reduction="none"
    ),
    "multi_label_classification": lambda logits, targets: F.binary_cross_entropy_with_logits(
        logits, targets, reduction="none"
    ).mean(-1),
    "regression": lambda logits, targets: F.mse_loss(logits, targets, reduction="none").mean(-1),
}


class ClassificationLoss(SFTLoss, nn.Module):
    """Loss of a classifier at the labeled tokens, which are the last ones of the rows.

    It is the loss of ``transformers`` for the same problem type: cross entropy for one class per row, binary cross
    entropy averaged over the classes for several, and the squared error for a number. A label is the number of a target
    in the table that :meth:`set_targets` sets; without a table it is a class.

    Example:
        >>> loss = torchtune.modules.loss.ClassificationLoss()
        >>> hidden, labels = torch.zeros(1, 3, 8), torch.tensor([[-100, -100, 1]])
        >>> total, count = loss.sum_and_count(hidden, labels, torch.nn.Linear(8, 4, bias=False))
        >>> round(total.item(), 4), count.item()  # log(4)
        (1.3863, 1)
    """

    predicts_tokens: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.problem_type = "single_label_classification"
        self._targets: Tensor | None = None  # [m, c], or [m, 1] of classes and numbers
        self._outputs: list[tuple[Tensor, Tensor]] | None = None

    def set_targets(self, problem_type: str, targets: Tensor) -> None:
        """Set the problem type and the table of targets.

        Args:
            problem_type: ``single_label_classification``, ``multi_label_classification`` or ``regression``.
            targets: float32 ``[m, c]``, one row for each distinct target: the index of a class (``c`` is 1), a 0 or 1
                for each of ``c`` classes, or a number (``c`` is 1).

        Raises:
            LossError: the problem type is unknown.
        """
        if problem_type not in _LOSSES:
            raise LossError(f"problem_type is '{problem_type}': choose one of {', '.join(_LOSSES)}.")
        self.problem_type = problem_type
        self._targets = targets

    def apply_compile_strategy(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Return the loss unchanged: logits of a few rows are not worth a compilation."""
        return self

    @contextmanager
    def recorded(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Yield a list to which every call inside the block appends its logits ``[n, c]`` and targets."""
        self._outputs = []
        try:
            yield self._outputs
        finally:
            self._outputs = None

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the mean loss over labeled tokens, or 0 if there are none.

        Args:
            outputs: logits ``[b, s, c]``.
            targets: labels int64 ``[b, s]``.

        Returns:
            Scalar, at least float32.
        """
        total, count = self.sum_and_count(outputs, targets, nn.Identity())
        return total / count.clamp(min=1)

    def sum_and_count(
        self,
        hidden: Tensor,
        labels: Tensor,
        projection: Projection,
        *,
        index: Tensor | None = None,
        weights: Tensor | None = None,
        row_losses: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute the weighted sum of the losses of labeled tokens, and the sum of their weights.

        Args:
            hidden: hidden states ``[b, s, d]``.
            labels: int64 ``[b, s]``, numbers of targets.
            projection: ``[n, d]`` -> logits ``[n, c]``, the ``output`` of the model.
            index: int64 ``[n]``, positions of the labeled tokens in the flattened batch.
            weights: float32 ``[b, s]``, factors of the losses of single tokens; None: each is 1.
            row_losses: list to which the losses ``[n]`` of the labeled tokens are appended, detached.

        Returns:
            Sum (scalar, at least float32) and count of labels (int64 scalar), or sum of their weights (float32 scalar).
        """
        labels = labels.flatten()  # [b * s]
        hidden = hidden.flatten(0, -2)  # [b * s, d]
        if index is None:
            index = label_index(labels)
        if not len(index):
            # Zero, with a graph to the same parameters: other ranks wait for their gradients.
            zero = projection(hidden[:1]).float().sum() * 0.0 + hidden.sum() * 0.0
            return zero, torch.zeros((), dtype=torch.int64, device=labels.device)
        logits = projection(hidden.index_select(0, index))  # [n, c]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        targets = self._targets_of(labels.index_select(0, index))
        losses = _LOSSES[self.problem_type](logits, targets.to(logits.dtype))  # [n]
        if self._outputs is not None:
            self._outputs.append((logits.detach(), targets.detach()))
        if row_losses is not None:
            row_losses.append(losses.detach())
        if weights is None:
            return losses.sum(), torch.full((), len(index), device=labels.device)
        label_weights = weights.flatten().index_select(0, index)  # [n]
        return (losses * label_weights).sum(), label_weights.sum()

    def _targets_of(self, numbers: Tensor) -> Tensor:
        """Return the rows ``[n, c]`` of the table for numbers of targets ``[n]``."""
        if self._targets is None:
            return numbers.unsqueeze(-1)
        if self._targets.device != numbers.device:  # at the first call
            self._targets = self._targets.to(numbers.device)
        return self._targets.index_select(0, numbers)
