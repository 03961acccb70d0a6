"""Loss of reward models."""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from torchtune.data import Batch
from torchtune.modules import last_hidden_states
from torchtune.modules.loss import LossError, Projection
from torchtune.rlhf.loss.dpo import ChosenRejectedOutputs, LossesAndRewards, PreferenceLoss


class RewardLoss(PreferenceLoss):
    """−log σ(s_c − s_r − margin) + c (s_c + s_r)², with the scores s_c and s_r of the two answers (Bradley-Terry).

    The model has one output (:func:`torchtune.modules.classifier_model`), which is read at the last token of an answer.
    The second term keeps scores near 0 (Eisenstein et al. 2023, arXiv:2312.09244). The margin is the entry ``margin``
    of the example, by default 0.

    Args:
        center_coefficient: coefficient c of the second term; with 0, the scores can drift.

    Example:
        >>> torchtune.rlhf.loss.RewardLoss().needs_reference
        False
    """

    needs_reference: ClassVar[bool] = False

    def __init__(self, center_coefficient: float = 0.01) -> None:
        super().__init__()
        if center_coefficient < 0:
            raise ValueError(f"center_coefficient is {center_coefficient}: below 0 it would drive the scores apart.")
        self.center_coefficient = center_coefficient

    def check_model(self, model: nn.Module) -> None:
        """Check that the model has one output. Raises :class:`LossError`."""
        check_one_output(model, "RewardLoss")

    def score(self, hidden: Tensor, batch: Batch, projection: Projection) -> Tensor:
        """Return the output at the last token of every document ``[n]``, float32; see :meth:`AnswerLoss.score`."""
        return pooled_scores(hidden, batch, projection)

    def compare(
        self,
        policy: ChosenRejectedOutputs,
        reference: ChosenRejectedOutputs | None = None,
        margin: Tensor | float = 0.0,
    ) -> LossesAndRewards:
        """Compute losses and scores of pairs; see :class:`PreferenceLoss`."""
        chosen = policy.chosen_logps  # the scores of a reward model
        rejected = policy.rejected_logps
        losses = -logsigmoid(chosen - rejected - margin)
        return losses + self.center_coefficient * (chosen + rejected).square(), chosen, rejected

    def _compare_batch(
        self, batch: Batch, policy: ChosenRejectedOutputs, reference: ChosenRejectedOutputs | None
    ) -> LossesAndRewards:
        margin = 0.0
        if "margin" in batch.per_document:
            margin, _ = batch.chosen_and_rejected(batch.per_document["margin"])  # the same in both answers
        losses, chosen, rejected = self.compare(policy, None, margin)
        return losses, chosen.detach(), rejected.detach()

    def more_metrics(self, policy: ChosenRejectedOutputs, chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
        """Return no metrics, since the rewards are the scores."""
        return {}


def check_one_output(model: nn.Module, loss: str) -> None:
    """Raise :class:`LossError` unless the model has one output, which a loss with this name reads."""
    num_outputs = model.output.weight.shape[0]
    if num_outputs != 1:
        raise LossError(
            f"loss: {loss} needs a model with one output, but this one has {num_outputs:,}: set model._component_ to "
            "torchtune.modules.classifier_model with num_classes=1 and base_model_path the builder of the model."
        )


def pooled_scores(hidden: Tensor, batch: Batch, projection: Projection) -> Tensor:
    """Return the score at the last token of every document, for a model with one output.

    Args:
        hidden: ``[b, s, d]``.
        batch: batch with documents, which define the ends of answers; token ids are not used.
        projection: ``model.output``, ``[..., d]`` -> ``[..., 1]``.

    Returns:
        Scores ``[n]``, float32 or wider; for a batch split over context-parallel ranks, 0 for documents with the last
        token on another rank.

    Raises:
        DataError: the batch has no documents.
    """
    last_hidden, is_local = last_hidden_states(hidden, batch)  # [n, d], [n]
    scores = projection(last_hidden).squeeze(-1)  # [n]
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    # The second term keeps the graph connected on ranks without a last token.
    return scores.masked_fill(~is_local, 0.0) + 0.0 * hidden.sum()
