"""Losses of rerankers, which score a query and a document in one sequence."""

from abc import abstractmethod
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtune.data import RERANKER_FILE, Batch, BatchLoader, DataError, ExampleDataset
from torchtune.modules.loss import LossError, Projection
from torchtune.rlhf.loss._base import AnswerLoss, Metrics, total_and_metrics
from torchtune.rlhf.loss.reward import check_one_output, pooled_scores


class RerankLoss(AnswerLoss):
    """Base class of losses of rerankers: models with one output, which is read at the last token of a pair.

    Checkpoints load in ``transformers`` as ``…ForSequenceClassification`` with one label, and in
    ``sentence-transformers`` as ``CrossEncoder``, whose ``predict`` then returns the scores.

    Attributes:
        listwise: whether an example is a query with all its candidates, as of
            :func:`torchtune.datasets.reranking_dataset` with ``listwise``.

    Example:
        >>> issubclass(torchtune.rlhf.loss.RerankBCELoss, torchtune.rlhf.loss.RerankLoss)
        True
    """

    needs_reference: ClassVar[bool] = False
    listwise: ClassVar[bool] = False

    def check_model(self, model: nn.Module) -> None:
        """Check that the model has one output. Raises :class:`LossError`."""
        check_one_output(model, type(self).__name__)

    def check_batch(self, batch: Batch) -> None:
        """Check that the batch has pairs with targets. Raises :class:`DataError`."""
        missing = {"example", "is_first", "target", "counts"} - batch.per_document.keys()
        if missing:
            raise DataError(
                f"loss: {type(self).__name__} reads pairs of queries and documents, but the batch has no "
                f"'{min(missing)}' per document: use torchtune.datasets.reranking_dataset with "
                "collate_fn=torchtune.data.collate_reranking."
            )

    def check_loader(self, loader: BatchLoader, name: str) -> None:
        """Check that examples are pairs or lists of candidates, as the loss needs them. Raises :class:`LossError`."""
        for dataset in loader.dataset.row_datasets():
            listwise = getattr(dataset, "listwise", self.listwise)
            if listwise != self.listwise:
                examples = "queries with all their candidates" if self.listwise else "pairs"
                raise LossError(
                    f"loss: {type(self).__name__} needs {examples} as examples: set dataset.listwise={self.listwise} "
                    "(and that of dataset_val), or take the other loss of rerankers."
                )

    def score(self, hidden: Tensor, batch: Batch, projection: Projection) -> Tensor:
        """Return the output at the last token of every pair ``[n]``, float32; see :meth:`AnswerLoss.score`."""
        return pooled_scores(hidden, batch, projection)

    def extra_files(self, model: nn.Module, dataset: ExampleDataset, tokenizer: Any) -> dict[str, Any]:
        """Return the files from which ``CrossEncoder`` loads the checkpoint, by path, and the template.

        The template is that of the dataset; a mixture of several templates has none.
        """
        templates = {part.pair_template for part in dataset.row_datasets()}
        if len(templates) != 1 or None in templates:  # no single template that would hold for all pairs
            return {}
        template = templates.pop()
        max_seq_len = getattr(tokenizer, "max_seq_len", None)
        chat_template = template.chat_template(tokenizer)
        transformer = "sentence_transformers.base.modules.transformer.Transformer"
        logits = {"method": "forward", "method_output_name": "logits"}
        files: dict[str, Any] = {
            RERANKER_FILE: {"template": template.text, "add_eos": template.add_eos, "max_seq_len": max_seq_len},
            "modules.json": [{"idx": 0, "name": "0", "path": "", "type": transformer}],
            "sentence_bert_config.json": {
                "transformer_task": "sequence-classification",
                "modality_config": {"text": logits, "message": {**logits, "format": "flat"}},
                "module_output_name": "scores",
                "max_seq_length": max_seq_len,
                # The chat template of the tokenizer, if it has one, is of conversations.
                "processing_kwargs": {"chat_template": {"chat_template": chat_template}},
            },
            "config_sentence_transformers.json": {
                "model_type": "CrossEncoder",
                "activation_fn": "torch.nn.modules.linear.Identity",  # scores as in training, not through a sigmoid
                "prompts": {},
                "default_prompt_name": None,
            },
        }
        if not getattr(tokenizer, "chat_templates", None):
            files["chat_template.jinja"] = chat_template  # without any, it would put no template around a pair
        return files

    def sum_and_metrics(
        self, batch: Batch, scores: Tensor, reference: Tensor | None = None, baseline: Tensor | None = None
    ) -> tuple[Tensor, Metrics]:
        """Sum the loss over the examples of this rank, and return metrics; see :meth:`AnswerLoss.sum_and_metrics`."""
        self.check_batch(batch)
        losses, metrics = self.compare(batch, scores)
        is_term = batch.per_document["counts"] & batch.per_document["is_first"]
        return total_and_metrics(self, losses, is_term, metrics)

    @abstractmethod
    def compare(self, batch: Batch, scores: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of each example at its first pair ``[n]``, and metrics ``[n]`` by name.

        Args:
            batch: from :func:`torchtune.data.collate_reranking`.
            scores: scores of the pairs ``[n]``.
        """


class RerankBCELoss(RerankLoss):
    """Binary cross entropy of the score s of a pair and its label y: −w y log σ(s) − (1 − y) log(1 − σ(s)).

    This is ``BinaryCrossEntropyLoss`` of ``sentence-transformers``' cross encoders. A label may be a fraction, such as
    a probability of another model.

    Args:
        positive_weight: weight w of positives, for data with many more negatives (``pos_weight`` there).

    Raises:
        ValueError: ``positive_weight`` is not above 0.

    Example:
        >>> row = {"documents": [[1, 2]], "targets": [1.0], "labels": [0]}
        >>> batch = torchtune.data.collate_reranking([row])
        >>> total, metrics = torchtune.rlhf.loss.RerankBCELoss().sum_and_metrics(batch, torch.tensor([0.0]))
        >>> round(total.item(), 4)  # log 2
        0.6931
    """

    trains_on = "documents"

    def __init__(self, positive_weight: float = 1.0) -> None:
        super().__init__()
        if positive_weight <= 0:
            raise ValueError(f"positive_weight is {positive_weight}: it must be above 0.")
        self.positive_weight = positive_weight

    def compare(self, batch: Batch, scores: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the losses ``[n]``, and how often a score above 0 is that of a positive (``reranking/accuracy``)."""
        targets = batch.per_document["target"].to(scores.dtype)
        weight = torch.full((), self.positive_weight, dtype=scores.dtype, device=scores.device)
        losses = F.binary_cross_entropy_with_logits(scores, targets, reduction="none", pos_weight=weight)
        return losses, {"reranking/accuracy": (scores > 0) == (targets > 0.5)}


ListTargets = Literal["labels", "softmax"]


class RerankListwiseLoss(RerankLoss):
    """Cross entropy −Σ p_i log softmax(s / temperature)_i over the candidates of a query.

    With the targets p = labels / Σ labels and one positive, this is the contrastive loss of a positive and its hard
    negatives: ``MultipleNegativesRankingLoss`` of ``sentence-transformers``' cross encoders with ``scale = 1 /
    temperature``, without activation, and without negatives of other queries. With p = softmax(labels), it is
    ``ListNetLoss`` (Cao et al. 2007), for graded labels.

    Args:
        temperature: divides the scores.
        targets: ``labels`` (divided by their sum) or ``softmax`` (of the labels).

    Raises:
        ValueError: ``temperature`` is not above 0, or ``targets`` is unknown.

    Example:
        >>> row = {"documents": [[1, 2], [1, 3]], "targets": [1.0, 0.0], "labels": [0]}
        >>> batch = torchtune.data.collate_reranking([row])
        >>> total, metrics = torchtune.rlhf.loss.RerankListwiseLoss().sum_and_metrics(batch, torch.tensor([1.0, 1.0]))
        >>> round(total.item(), 4)  # log 2
        0.6931
    """

    trains_on = "candidates"
    listwise: ClassVar[bool] = True

    def __init__(self, temperature: float = 1.0, targets: ListTargets = "labels") -> None:
        super().__init__()
        if temperature <= 0:
            raise ValueError(f"temperature is {temperature}: it must be above 0.")
        if targets not in get_args(ListTargets):
            raise ValueError(f"targets is {targets!r}: it must be 'labels' or 'softmax'.")
        self.temperature = temperature
        self.targets = targets

    def compare(self, batch: Batch, scores: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the losses ``[n]``, and where the best-ranked positive of a query is among its candidates.

        ``reranking/accuracy`` is how often it is the first, and ``reranking/mrr`` the mean of 1 / rank.
        """
        example = batch.per_document["example"]
        is_candidate = example[:, None] == example[None]  # [n, n], whether two pairs have the same query
        labels = batch.per_document["target"].to(scores.dtype)
        if self.targets == "labels":
            sums = (is_candidate * labels).sum(1)  # [n], of each pair's query
            targets = labels / sums
        else:
            targets = _log_softmax(labels, is_candidate).exp()
        log_probs = _log_softmax(scores / self.temperature, is_candidate)
        losses = -(is_candidate * (targets * log_probs)).sum(1)  # [n], the same for all pairs of a query
        with torch.no_grad():
            is_above = is_candidate & (scores[None] > scores[:, None])  # [n, n], whether pair j is above pair i
            ranks = 1 + is_above.sum(1)  # [n]
            reciprocal_ranks = torch.where(labels > 0, 1.0 / ranks, 0.0)
            best = (is_candidate * reciprocal_ranks).amax(1)  # [n], of the query
        return losses, {"reranking/accuracy": best == 1, "reranking/mrr": best}


def _log_softmax(values: Tensor, is_candidate: Tensor) -> Tensor:
    """Return the log-softmax of ``[n]`` within groups, given as bool ``[n, n]``."""
    of_group = values[None].expand_as(is_candidate).masked_fill(~is_candidate, -torch.inf)
    return values - of_group.logsumexp(1)
