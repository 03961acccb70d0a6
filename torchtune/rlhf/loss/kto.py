"""KTO loss for single answers labeled good or bad."""

from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, Batch, DataError, Documents
from torchtune.rlhf.loss._base import AnswerLoss, Metrics, labelled, total_and_metrics


class KTOLoss(AnswerLoss):
    """w_d (1 − σ(β(r − z))) for good answers and w_u (1 − σ(β(z − r))) for bad answers (arXiv:2402.01306).

    r is the log-ratio of policy and reference. z estimates the KL divergence and is detached: z = max(0, mean r) over
    mismatched pairs, which combine a prompt with the answer of the next example. So, unlike other losses of this
    library, KTO depends on the composition of micro-batches.

    Args:
        beta: scale β of the log-ratio; a higher value stays closer to the reference.
        desirable_weight: weight w_d of good answers; with few good answers, raise it until w_d · good and w_u · bad are
            about equal.
        undesirable_weight: weight w_u of bad answers.

    Example:
        >>> torchtune.rlhf.loss.KTOLoss(beta=0.1, desirable_weight=1.0, undesirable_weight=1.5).needs_reference
        True
    """

    trains_on = "answers"
    min_examples: ClassVar[int] = 2

    def __init__(self, beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0) -> None:
        super().__init__()
        if beta <= 0:
            raise ValueError(f"beta is {beta}: it must be above 0.")
        if min(desirable_weight, undesirable_weight) < 0 or desirable_weight == undesirable_weight == 0:
            raise ValueError(
                f"desirable_weight is {desirable_weight} and undesirable_weight {undesirable_weight}: neither may be "
                "below 0, and one must be above."
            )
        self.beta = beta
        self.desirable_weight, self.undesirable_weight = desirable_weight, undesirable_weight

    def check_batch(self, batch: Batch) -> None:
        """Check that the batch has labeled answers. Raises :class:`DataError`."""
        _is_good(batch)

    def forward(
        self, policy: Tensor, reference: Tensor, is_chosen: Tensor, baseline: Tensor | float
    ) -> tuple[Tensor, Tensor]:
        """Compute losses and rewards of answers ``[n]``.

        Args:
            policy: log-probs of the answers from the policy, summed over tokens ``[n]``.
            reference: log-probs from the reference ``[n]``.
            is_chosen: bool ``[n]``, True for good answers.
            baseline: mean r over mismatched pairs; z is ``max(0, baseline)``.
        """
        ratios = policy - reference
        sign = torch.where(is_chosen, 1.0, -1.0).to(ratios.dtype)
        z = torch.as_tensor(baseline, dtype=ratios.dtype, device=ratios.device).detach().clamp(min=0.0)
        weights = torch.where(is_chosen, self.desirable_weight, self.undesirable_weight).to(ratios.dtype)
        return weights * torch.sigmoid(-sign * self.beta * (ratios - z)), (self.beta * ratios).detach()

    def sum_and_metrics(
        self, batch: Batch, scores: Tensor, reference: Tensor | None = None, baseline: Tensor | None = None
    ) -> tuple[Tensor, Metrics]:
        """Sum losses and metrics, see :meth:`AnswerLoss.sum_and_metrics`."""
        good, counts = _is_good(batch), labelled(batch) > 0
        losses, rewards = self(scores, reference, good, baseline)
        total, metrics = total_and_metrics(self, losses, counts, {"kl": baseline.clamp(min=0.0).expand_as(losses)})
        for name, of in (("chosen", counts & good), ("rejected", counts & ~good)):
            terms = {f"rewards/{name}": rewards, f"log_probs/{name}": scores.detach()}
            metrics |= {key: (torch.where(of, value, 0.0).sum(), of.sum()) for key, value in terms.items()}
        return total, metrics

    def mismatched_batch(self, batch: Batch) -> Batch | None:
        """Pair every prompt with the answer of the next example, truncated to the longest document in the batch.

        The prompt consists of the tokens before the first labeled token. Lengths and labels are read on the host, so
        that it does not wait for an accelerator.

        Raises:
            DataError: the batch has only one example, or is split over context-parallel ranks.
        """
        _is_good(batch)
        count = batch.num_documents
        if count < 2:
            raise DataError(
                "loss: KTOLoss compares every prompt with the answer of another example, but a micro-batch has one: "
                "set batch_size to 2 or more, to a number that leaves no single example at the end of an epoch."
            )
        if batch.shard[1] > 1:
            raise DataError("loss: KTOLoss makes answers of parts of the batch: set context_parallel_dim to 1.")
        on_host = batch.on_host
        tokens, labels = on_host.tokens.flatten(), on_host.labels.flatten()
        starts = [0, *torch.tensor(batch.documents.lengths).cumsum(0).tolist()]
        spans = list(pairwise(starts))[:count]
        has_label = (labels != CROSS_ENTROPY_IGNORE_IDX).tolist()
        # The first label is at the last token of the prompt.
        first = [next((at for at in range(start, end) if has_label[at]), end - 1) for start, end in spans]
        longest, new_tokens, new_labels = max(end - start for start, end in spans), [], []
        for i, (start, _) in enumerate(spans):
            j = (i + 1) % count
            prompt, end = slice(start, first[i] + 1), spans[j][1]
            row = torch.cat([tokens[prompt], tokens[first[j] + 1 : end]])
            ignored = torch.full_like(labels[start : first[i]], CROSS_ENTROPY_IGNORE_IDX)
            targets = torch.cat([ignored, labels[first[j] : end]])
            if len(row) > longest:
                row, targets = row[:longest], targets[:longest]
                targets[-1] = CROSS_ENTROPY_IGNORE_IDX  # the target of the last token is truncated
            new_tokens.append(row)
            new_labels.append(targets)
        documents = Documents.from_lengths([len(row) for row in new_tokens], tokens.device)
        positions = documents.positions().to(tokens.device)
        mismatched = Batch(torch.cat(new_tokens)[None], torch.cat(new_labels)[None], positions[None], documents)
        return mismatched.to(batch.tokens.device, non_blocking=True)


def _is_good(batch: Batch) -> Tensor:
    """Return bool ``[n]``, True for good answers. Raises :class:`DataError` for a batch of pairs."""
    if "pair" in batch.per_document or "is_chosen" not in batch.per_document:
        raise DataError(
            "loss: KTOLoss reads single answers with a label, not pairs: use torchtune.datasets.kto_dataset."
        )
    return batch.per_document["is_chosen"]
