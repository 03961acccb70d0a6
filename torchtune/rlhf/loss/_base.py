"""Base class of post-training losses."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from torchtune.data import Batch, BatchLoader, DataError, ExampleDataset
from torchtune.modules.loss import LossError, Projection, check_causal, token_log_probs
from torchtune.modules.moe.balance import Balance, balance_of
from torchtune.training import ParallelDims

# Metric name -> (sum over terms, number of terms).
Metrics = dict[str, tuple[Tensor, Tensor]]


class AnswerLoss(nn.Module, ABC):
    """Base class of losses over answers, one answer per document of a batch, by log-probs or by a score.

    Attributes:
        trains_on: kind of the dataset's rows: pairs of answers (``pairs``), single answers labeled good or bad
            (``answers``), queries with passages (``retrieval``), pairs of a query and a document (``documents``),
            queries with candidates (``candidates``), or prompts that the model answers (``prompts``). A simulated run
            generates such rows.
        needs_reference: whether the loss uses a reference model.
        min_examples: minimum number of examples per micro-batch.
        rows_per_loss: number of rows that are compared with each other where a report measures the loss of rows.

    Example:
        >>> issubclass(torchtune.rlhf.loss.KTOLoss, torchtune.rlhf.loss.AnswerLoss)
        True
    """

    trains_on: ClassVar[Literal["pairs", "answers", "retrieval", "documents", "candidates", "prompts"]] = "pairs"
    needs_reference: ClassVar[bool] = True
    min_examples: ClassVar[int] = 1
    rows_per_loss: ClassVar[int] = 1
    balance: Balance | None = None  # balancing loss of the model's experts, set by setup_loss
    dims = ParallelDims()  # ranks over which examples are compared, set by setup_loss

    def apply_compile_strategy(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Return the loss without compiling it; compilation gains nothing, because the projection is fused."""
        return self

    def check_model(self, model: nn.Module) -> None:
        """Check that the model's output fits the loss. Raises :class:`LossError`."""
        check_causal(model, type(self).__name__)
        num_outputs = model.output.weight.shape[0]
        vocab_size = model.tok_embeddings.weight.shape[0]
        if num_outputs < vocab_size:
            raise LossError(
                f"loss: {type(self).__name__} needs a language model, but the model ends in {num_outputs} output(s): "
                "train with torchtune.rlhf.loss.RewardLoss, or take the builder without 'classifier' or 'reward'."
            )

    def check_batch(self, batch: Batch) -> None:
        """Check that a batch has the entries that the loss needs. Raises :class:`DataError`."""

    def check_loader(self, loader: BatchLoader, name: str) -> None:
        """Check that the loss can be computed for every micro-batch of a loader. Raises :class:`LossError`.

        Args:
            loader: loader of the examples.
            name: name of the setting with its batch size.
        """

    def score(self, hidden: Tensor, batch: Batch, projection: Projection) -> Tensor:
        """Score every document; by default the sum of its labels' log-probs.

        Args:
            hidden: hidden states from ``model(..., output="hidden")`` ``[b, s, d]``.
            batch: from :func:`torchtune.data.collate_preference`.
            projection: ``model.output``.

        Returns:
            Scores ``[n]``, float32 or wider. For a batch split over context-parallel ranks, this rank's partial sums.
        """
        return document_log_probs(hidden, batch, projection)

    def score_batch(self, model: nn.Module, batch: Batch) -> Tensor:
        """Score every document of a batch with a model; a collective of the ranks that share the batch.

        Args:
            model: the trained model.
            batch: from :func:`torchtune.data.collate_preference`, on the model's device.

        Returns:
            Scores ``[n, ...]``, the same on all ranks that share the batch; see :meth:`score`.
        """
        hidden = model(**batch.model_inputs(), output="hidden")
        return self.dims.sum_over_sequence(self.score(hidden, batch, model.output))

    def extra_files(self, model: nn.Module, dataset: ExampleDataset, tokenizer: Any) -> dict[str, Any]:
        """Return the contents of files that a checkpoint gets beside the model's, by path; by default none.

        A content is a text, or the content of a JSON file.

        Args:
            model: the trained model.
            dataset: the training dataset.
            tokenizer: tokenizer of the model.
        """
        return {}

    @abstractmethod
    def sum_and_metrics(
        self, batch: Batch, scores: Tensor, reference: Tensor | None = None, baseline: Tensor | None = None
    ) -> tuple[Tensor, Metrics]:
        """Sum the loss over the terms of a batch (``batch.num_terms``), and return metrics.

        Args:
            batch: from :func:`torchtune.data.collate_preference`.
            scores: scores of the trained model ``[n]``; see :meth:`score`.
            reference: scores of the reference model ``[n]``, if needed.
            baseline: scalar, mean log-ratio of the :meth:`mismatched_batch` documents.

        Returns:
            The sum as a scalar, and metrics by name: (sum, number of terms).
        """

    def mismatched_batch(self, batch: Batch) -> Batch | None:
        """Return additional documents for ``baseline``, their mean log-ratio; None if the loss needs no baseline."""
        return None

    def total(self, losses: Tensor, counts: Tensor, weights: Tensor | None = None) -> Tensor:
        """Sum the losses of the terms that count, and add the balancing loss of the model's experts.

        Args:
            losses: losses of the terms ``[p]``.
            counts: bool ``[p]``; False for the filler example of a rank without data.
            weights: factors of the losses ``[p]``; None for 1.
        """
        num_terms = counts.sum()
        if weights is not None:
            losses = weights.to(losses.dtype) * losses
            num_terms = (weights * counts).sum()
        # Multiplied by 0 instead of left out: a filler's backward pass is a collective of sharded models as well.
        total = torch.where(counts, losses, 0.0 * losses).sum()
        if self.balance is None:
            return total
        return self.balance.add_to(total, num_terms)


class TokenLoss(AnswerLoss):
    """Base class of losses of sampled answers, by the log-probs of their tokens.

    Attributes:
        temperature: divides the logits, as in sampling; the recipe sets it.
    """

    trains_on = "prompts"
    temperature = 1.0

    def score(self, hidden: Tensor, batch: Batch, projection: Projection) -> Tensor:
        """Return log-probs of the labels ``[b, s]``, float32 or wider; 0 at positions without a label."""
        return token_log_probs(hidden, batch.labels, projection, self.temperature, index=batch.label_index)

    @staticmethod
    def clip(ratios: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
        """Return −min(ρA, clip(ρ, 1 − low, 1 + high) A), and whether the ratio is clipped."""
        unclipped = -advantages * ratios
        clipped = -advantages * ratios.clamp(1.0 - low, 1.0 + high)
        return torch.maximum(clipped, unclipped), clipped > unclipped


def document_log_probs(hidden: Tensor, batch: Batch, projection: Projection, temperature: float = 1.0) -> Tensor:
    """Sum the log-probs of every document's labels.

    Args:
        hidden: hidden states from ``model(..., output="hidden")`` ``[b, s, d]``.
        batch: batch with shifted labels.
        projection: ``model.output``.
        temperature: divides the logits.

    Returns:
        ``[n]`` in nats, float32 (float64 for float64 weights); for a batch split over context-parallel ranks, this
        rank's partial sums.

    Example:
        >>> row = {"chosen_input_ids": [1, 2, 3], "chosen_labels": [2, 3, -100]}
        >>> row |= {"rejected_input_ids": [1, 2, 4], "rejected_labels": [2, 4, -100]}
        >>> batch = torchtune.data.collate_preference([row])
        >>> torchtune.rlhf.document_log_probs(model(batch.tokens, output="hidden"), batch, model.output).shape
        torch.Size([2])
    """
    log_probs = token_log_probs(hidden, batch.labels, projection, temperature, index=batch.label_index)
    return batch.sum_per_document(log_probs)


def setup_loss(loss: Any, model: nn.Module, dims: ParallelDims | None = None) -> AnswerLoss:
    """Check a loss of a preference recipe, and prepare it for the model.

    Args:
        loss: an :class:`AnswerLoss`.
        model: model with ``output`` and ``tok_embeddings``.
        dims: parallel dims, for a loss that compares the examples of all ranks; None: one process.

    Raises:
        LossError: the loss is not an :class:`AnswerLoss`, or the model's output does not fit it.

    Example:
        >>> loss = torchtune.rlhf.loss.setup_loss(torchtune.rlhf.loss.DPOLoss(), model)
        >>> loss.needs_reference
        True
    """
    if not isinstance(loss, AnswerLoss):
        raise LossError(
            f"loss: {type(loss).__name__} is not a preference loss: use one of torchtune.rlhf.loss, for example "
            "torchtune.rlhf.loss.DPOLoss, or run a fine-tuning recipe."
        )
    loss.check_model(model)
    loss.balance = balance_of(model)
    if dims is not None:
        loss.dims = dims
    return loss


def total_and_metrics(
    loss: AnswerLoss, losses: Tensor, counts: Tensor, terms: dict[str, Tensor], weights: Tensor | None = None
) -> tuple[Tensor, Metrics]:
    """Sum losses and metrics over the terms that count; metrics are means in which all terms are equal.

    Args:
        loss: loss with :meth:`AnswerLoss.total`.
        losses: losses of the terms ``[p]``.
        counts: bool ``[p]``, True for terms that count.
        terms: metrics of the terms by name, ``[p]`` each.
        weights: factors of the losses ``[p]``; None for 1.
    """
    num_terms = counts.sum()
    metrics = {}
    for name, values in terms.items():
        # Selected, not multiplied by 0: a filler's metric may be NaN.
        counted = torch.where(counts, values.detach().float(), 0.0)
        metrics[name] = (counted.sum(), num_terms)
    return loss.total(losses, counts, weights), metrics


def label_counts(batch: Batch) -> Tensor:
    """Return the number of labeled tokens per document ``[n]``. Raises :class:`DataError` if the batch lacks it."""
    if "label_counts" not in batch.per_document:
        raise DataError("collate_fn: the batch has no 'label_counts' per document: use collate_preference.")
    return batch.per_document["label_counts"]
