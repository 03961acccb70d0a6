"""KTO loss for single answers labeled good or bad."""

from typing import ClassVar

import torch
from torch import Tensor

from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, Batch, DataError, Documents
from torchtune.rlhf.loss._base import AnswerLoss, Metrics, label_counts, total_and_metrics


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
    rows_per_loss: ClassVar[int] = 2

    def __init__(self, beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0) -> None:
        super().__init__()
        if beta <= 0:
            raise ValueError(f"beta is {beta}: it must be above 0.")
        lowest_weight = min(desirable_weight, undesirable_weight)
        highest_weight = max(desirable_weight, undesirable_weight)
        if lowest_weight < 0 or highest_weight == 0:
            raise ValueError(
                f"desirable_weight is {desirable_weight} and undesirable_weight {undesirable_weight}: neither may be "
                "below 0, and one must be above."
            )
        self.beta = beta
        self.desirable_weight = desirable_weight
        self.undesirable_weight = undesirable_weight

    def check_batch(self, batch: Batch) -> None:
        """Check that the batch has labeled answers. Raises :class:`DataError`."""
        if "pair" in batch.per_document or "is_chosen" not in batch.per_document:
            raise DataError(
                "loss: KTOLoss reads single answers with a label, not pairs: use torchtune.datasets.kto_dataset."
            )

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
        log_ratios = policy - reference  # r, [n]
        sign = torch.where(is_chosen, 1.0, -1.0).to(log_ratios.dtype)
        z = torch.as_tensor(baseline, dtype=log_ratios.dtype, device=log_ratios.device)
        z = z.detach().clamp(min=0.0)  # a KL divergence is not negative, although its estimate may be
        weights = torch.where(is_chosen, self.desirable_weight, self.undesirable_weight).to(log_ratios.dtype)
        losses = weights * torch.sigmoid(-sign * self.beta * (log_ratios - z))  # 1 − σ(x) is σ(−x)
        rewards = (self.beta * log_ratios).detach()
        return losses, rewards

    def sum_and_metrics(
        self, batch: Batch, scores: Tensor, reference: Tensor | None = None, baseline: Tensor | None = None
    ) -> tuple[Tensor, Metrics]:
        """Sum losses and metrics, see :meth:`AnswerLoss.sum_and_metrics`."""
        self.check_batch(batch)
        is_good = batch.per_document["is_chosen"]  # [n]
        counts = label_counts(batch) > 0  # an answer without labels is the filler of a rank without data
        losses, rewards = self(scores, reference, is_good, baseline)
        kl = baseline.clamp(min=0.0).expand_as(losses)
        weights = batch.per_document.get("weight")
        total, metrics = total_and_metrics(self, losses, counts, {"kl": kl}, weights)
        log_probs = scores.detach()
        for name, selected in (("chosen", counts & is_good), ("rejected", counts & ~is_good)):
            num_selected = selected.sum()
            metrics[f"rewards/{name}"] = (torch.where(selected, rewards, 0.0).sum(), num_selected)
            metrics[f"log_probs/{name}"] = (torch.where(selected, log_probs, 0.0).sum(), num_selected)
        return total, metrics

    def mismatched_batch(self, batch: Batch) -> Batch | None:
        """Pair every prompt with the answer of the next example, truncated to the longest document in the batch.

        The prompt consists of the tokens before the first labeled token. Lengths and labels are read on the host, so
        that it does not wait for an accelerator.

        Raises:
            DataError: the batch has only one example, or is split over context-parallel ranks.
        """
        self.check_batch(batch)
        num_answers = batch.num_documents
        if num_answers < 2:
            raise DataError(
                "loss: KTOLoss compares every prompt with the answer of another example, but a micro-batch has one: "
                "set batch_size to 2 or more, to a number that leaves no single example at the end of an epoch."
            )
        if batch.shard[1] > 1:
            raise DataError("loss: KTOLoss makes answers of parts of the batch: set context_parallel_dim to 1.")
        prompts = []  # tokens and labels of each example
        answers = []
        on_host = batch.on_host
        lengths = batch.documents.lengths[:num_answers]  # without the document of padding
        tokens = on_host.tokens.flatten()[: sum(lengths)].split(lengths)
        labels = on_host.labels.flatten()[: sum(lengths)].split(lengths)
        for document, targets in zip(tokens, labels, strict=True):
            # Labels are shifted: the last token of a prompt has the first label, the first token of the answer.
            labeled = (targets != CROSS_ENTROPY_IGNORE_IDX).nonzero()
            last_prompt_token = len(document) - 1  # of a filler, which has no labels
            if len(labeled):
                last_prompt_token = int(labeled[0])
            ignored = torch.full_like(targets[:last_prompt_token], CROSS_ENTROPY_IGNORE_IDX)
            prompts.append((document[: last_prompt_token + 1], ignored))
            answers.append((document[last_prompt_token + 1 :], targets[last_prompt_token:]))

        longest = max(lengths)
        new_tokens = []
        new_labels = []
        answers_of_next = [*answers[1:], answers[0]]
        for (prompt, prompt_labels), (answer, answer_labels) in zip(prompts, answers_of_next, strict=True):
            document = torch.cat([prompt, answer])
            targets = torch.cat([prompt_labels, answer_labels])
            if len(document) > longest:
                document = document[:longest]
                targets = targets[:longest]
                targets[-1] = CROSS_ENTROPY_IGNORE_IDX  # the token that the last one predicts is truncated
            new_tokens.append(document)
            new_labels.append(targets)
        device = tokens[0].device  # the host
        documents = Documents.from_lengths([len(document) for document in new_tokens], device)
        positions = documents.positions().to(device)
        mismatched = Batch(
            tokens=torch.cat(new_tokens)[None],  # [1, s]
            labels=torch.cat(new_labels)[None],
            input_pos=positions[None],
            documents=documents,
        )
        return mismatched.to(batch.tokens.device, non_blocking=True)
