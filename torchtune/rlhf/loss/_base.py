"""What a loss of preferences is to the recipes that train with it."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from torchtune.data import Batch, DataError
from torchtune.modules.loss import LossError, token_log_probs
from torchtune.modules.loss._projection import Projection
from torchtune.modules.moe.balance import Balance, balance_of

# Name -> (sum over terms, number of terms).
Metrics = dict[str, tuple[Tensor, Tensor]]


class AnswerLoss(nn.Module, ABC):
    """Loss over answers, each a document of a batch: by their log-probs, or by a score.

    Attributes:
        trains_on: what a row of the dataset is: a pair of answers (``pairs``), one that is labelled good or bad
            (``answers``), or a prompt that the model answers (``prompts``). A simulated run makes such rows.
        needs_reference: whether it compares with a reference model.
        min_examples: fewest examples of a micro-batch.

    Example:
        >>> issubclass(torchtune.rlhf.loss.KTOLoss, torchtune.rlhf.loss.AnswerLoss)
        True
    """

    trains_on: ClassVar[Literal["pairs", "answers", "prompts"]] = "pairs"
    needs_reference: ClassVar[bool] = True
    min_examples: ClassVar[int] = 1
    balance: Balance | None = None  # of the model's experts, from setup_loss

    def apply_compile_strategy(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Nothing here gains from compilation: the products with the output projection are one kernel already."""
        return self

    def check_model(self, model: nn.Module) -> None:
        """See that ``model`` ends in what the loss reads. Raises :class:`LossError`."""
        rows, vocabulary = model.output.weight.shape[0], model.tok_embeddings.weight.shape[0]
        if rows < vocabulary:
            raise LossError(
                f"loss: {type(self).__name__} needs a language model, but the model ends in {rows} output(s): train "
                "with torchtune.rlhf.loss.RewardLoss, or take the builder without 'classifier' or 'reward'."
            )

    def check_batch(self, batch: Batch) -> None:
        """See that ``batch`` has what the loss compares. Raises :class:`DataError`."""

    def score(self, hidden: Tensor, batch: Batch, projection: Projection) -> Tensor:
        """What the loss compares of every document: the sum of the log-probs of its labels.

        Args:
            hidden: what ``model(..., output="hidden")`` returns ``[b, s, d]``.
            batch: of :func:`torchtune.data.collate_preference`.
            projection: ``model.output``.

        Returns:
            ``[n]``, float32 or wider. Of a batch that is split over context-parallel ranks, this rank's summand.
        """
        return document_log_probs(hidden, batch, projection)

    @abstractmethod
    def sum_and_metrics(
        self, batch: Batch, scores: Tensor, reference: Tensor | None = None, baseline: Tensor | None = None
    ) -> tuple[Tensor, Metrics]:
        """The loss summed over the terms of a batch (``batch.num_terms``), and what to log of them.

        Args:
            batch: of :func:`torchtune.data.collate_preference`.
            scores: of the model that is trained ``[n]``; see :meth:`score`.
            reference: of the reference model ``[n]``, where one is needed.
            baseline: scalar, what :meth:`mismatched` is for.

        Returns:
            scalar, and name -> (sum, number of terms).
        """

    def mismatched(self, batch: Batch) -> Batch | None:
        """Further documents; their mean log-ratio to the reference is the ``baseline``. None if there are none."""
        return None

    def total(self, losses: Tensor, counts: Tensor) -> Tensor:
        """The sum of the losses of terms that count, with the balancing loss of the model's experts.

        Args:
            losses: ``[p]``.
            counts: bool ``[p]``; False for the example of a rank that has none.
        """
        total = torch.where(counts, losses, 0.0 * losses).sum()
        return total if self.balance is None else self.balance.add_to(total, counts.sum())


def document_log_probs(hidden: Tensor, batch: Batch, projection: Projection, temperature: float = 1.0) -> Tensor:
    """Log-probs of the labels of every document, summed.

    Args:
        hidden: what ``model(..., output="hidden")`` returns ``[b, s, d]``.
        batch: labels are shifted, as those of all datasets.
        projection: ``model.output``.
        temperature: divides the logits.

    Returns:
        ``[n]`` in nats, float32 (float64 for float64 weights); of a batch that is split over context-parallel ranks,
        this rank's summand.

    Example:
        >>> side = {"input_ids": [1, 2, 3], "labels": [2, 3, -100]}
        >>> row = {f"{name}_{key}": value for name in ("chosen", "rejected") for key, value in side.items()}
        >>> batch = torchtune.data.collate_preference([row])
        >>> torchtune.rlhf.document_log_probs(model(batch.tokens, output="hidden"), batch, model.output).shape
        torch.Size([2])
    """
    return batch.sum_per_document(token_log_probs(hidden, batch.labels, projection, temperature))


def setup_loss(loss: Any, model: nn.Module) -> AnswerLoss:
    """Make a loss ready for a preference recipe, and check it before training.

    Args:
        loss: an :class:`AnswerLoss`.
        model: has ``output`` and ``tok_embeddings``.

    Raises:
        LossError: it is another kind of loss, or the model does not end in what it reads.

    Example:
        >>> loss = torchtune.rlhf.loss.setup_loss(torchtune.rlhf.loss.DPOLoss(), model)
        >>> loss.needs_reference
        True
    """
    if not isinstance(loss, AnswerLoss):
        raise LossError(
            f"loss: {type(loss).__name__} is no loss of preferences: give one of torchtune.rlhf.loss, for example "
            "torchtune.rlhf.loss.DPOLoss, or run a recipe of fine-tuning."
        )
    loss.check_model(model)
    loss.balance = balance_of(model)
    return loss


def total_and_metrics(
    loss: AnswerLoss, losses: Tensor, counts: Tensor, terms: dict[str, Tensor]
) -> tuple[Tensor, Metrics]:
    """Sum what was found of every term, leaving out terms that do not count.

    Args:
        loss: has the :meth:`AnswerLoss.total`.
        losses: ``[p]``.
        counts: bool ``[p]``.
        terms: name -> ``[p]``.
    """
    number = counts.sum()
    sums = {name: torch.where(counts, values.detach().float(), 0.0).sum() for name, values in terms.items()}
    return loss.total(losses, counts), {name: (value, number) for name, value in sums.items()}


def labelled(batch: Batch) -> Tensor:
    """Labelled tokens of every document ``[n]``. Raises :class:`DataError` where collation did not count them."""
    if "label_counts" not in batch.per_document:
        raise DataError("collate_fn: the batch has no 'label_counts' per document: use collate_preference.")
    return batch.per_document["label_counts"]
