"""Losses on labeled rows, as in validation: perplexity of a language model, and scores of a classifier."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from torchtune.data import BatchLoader, DataError, as_example_dataset, collate_documents
from torchtune.datasets import REGRESSION, SINGLE_LABEL, ClassificationDataset, ClassificationTask
from torchtune.evaluation._eval_rows import EvaluationError
from torchtune.generation import evaluating
from torchtune.modules.loss import ClassificationLoss, LinearCrossEntropyLoss
from torchtune.modules.transformer import TransformerDecoder
from torchtune.training import classification_scores, number_targets
from torchtune.training.parallel import sequence_multiple


@dataclass(frozen=True)
class Perplexity:
    """Mean negative log-likelihood over labeled tokens.

    Attributes:
        loss: mean negative log-likelihood in nats per labeled token.
        tokens: number of labeled tokens.

    Example:
        >>> torchtune.evaluation.Perplexity(loss=0.0, tokens=12).value
        1.0
    """

    loss: float
    tokens: int

    @property
    def value(self) -> float:
        """``exp(loss)``, or infinity on overflow."""
        if self.loss >= 700:  # the largest float64 is about exp(709)
            return math.inf
        return math.exp(self.loss)


@torch.no_grad()
def perplexity(model: TransformerDecoder, dataset: Any, *, batch_size: int = 4) -> Perplexity:
    """Compute the mean loss over a dataset's labeled tokens, as in validation.

    All ranks of a sharded model call it with the same dataset.

    Args:
        model: the decoder; it runs in evaluation mode.
        dataset: rows with ``tokens`` and ``labels``, packed or not, as from :mod:`torchtune.datasets`.
        batch_size: rows per batch.

    Raises:
        EvaluationError: a row is longer than the model's context, no token is labeled, or the loss is not finite.

    Example:
        >>> rows = [{"tokens": [5, 6, 7], "labels": [6, 7, -100]}]
        >>> torchtune.evaluation.perplexity(model, rows).tokens
        2
    """
    loss_fn = LinearCrossEntropyLoss()
    device = model.tok_embeddings.weight.device
    multiple = sequence_multiple(model)
    loader = BatchLoader(dataset, batch_size=batch_size, collate_fn=collate_documents, shuffle=False, seed=0)
    total_loss = 0.0
    tokens = 0
    rows = 0
    with evaluating(model):
        for (batch,) in tqdm(loader, desc="Perplexity", unit="batch", disable=None):  # a step of one micro-batch
            longest = int(batch.input_pos.max()) + 1
            if longest > model.max_seq_len:
                raise EvaluationError(
                    f"perplexity: one of the rows {rows + 1} to {rows + batch_size} has {longest:,} tokens and the "
                    f"model's context is {model.max_seq_len:,}: split it."
                )
            rows += batch_size
            if batch.num_labels == 0:  # on all ranks, which have the same rows: none waits in a collective
                continue
            # Sequence parallelism splits the positions evenly over the ranks.
            batch = batch.pad_to_multiple(multiple).to(device)
            hidden = model(**batch.model_inputs(), output="hidden")
            # A sum over tokens: the mean of batch means would weigh short batches more.
            loss_sum, count = loss_fn.sum_and_count(hidden, batch.labels, model.output)
            total_loss += float(loss_sum)
            tokens += int(count)
    if not tokens:
        raise EvaluationError("perplexity: no token of the data is labeled: use rows with an answer, or texts.")
    if not math.isfinite(total_loss):
        raise EvaluationError(
            f"perplexity: the loss is {total_loss}: load the model in fp32, or its training has diverged."
        )
    return Perplexity(total_loss / tokens, tokens)


@dataclass(frozen=True)
class ClassificationReport:
    """Scores of a classifier.

    Attributes:
        rows: number of rows.
        loss: mean loss of the rows.
        scores: ``accuracy`` and ``f1``, or ``mae`` and ``r2``; see
            :func:`torchtune.training.classification_scores`.

    Example:
        >>> torchtune.evaluation.ClassificationReport(rows=2, loss=0.1, scores={"accuracy": 1.0}).rows
        2
    """

    rows: int
    loss: float
    scores: dict[str, float]


@torch.no_grad()
def evaluate_classifier(model: TransformerDecoder, dataset: Any, *, batch_size: int = 16) -> ClassificationReport:
    """Compute loss and scores of a classifier on a dataset of labels, as in validation.

    Args:
        model: the classifier; it runs in evaluation mode.
        dataset: from :func:`torchtune.datasets.classification_dataset`; its classes are those of the model.
        batch_size: rows per batch.

    Raises:
        EvaluationError: the model is not a classifier, the rows have no labels, or one has another class.

    Example:
        >>> head = {"checkpoint_dir": checkpoint}
        >>> model = torchtune.modules.classifier_model(2, "torchtune.models.from_hf_config", **head)
        >>> data = torchtune.datasets.classification_dataset(tokenizer, [{"text": "the cat", "label": 1}])
        >>> torchtune.evaluation.evaluate_classifier(model, data).rows
        1
    """
    task = _task_of(model)
    datasets = as_example_dataset(dataset).row_datasets()
    if not all(isinstance(rows, ClassificationDataset) for rows in datasets):
        raise EvaluationError(
            "a classifier is measured on rows with labels: use torchtune.datasets.classification_dataset."
        )
    loss_fn = ClassificationLoss()
    try:
        number_targets(task, datasets, loss_fn)  # gives rows and loss the numbers of the targets
    except DataError as error:
        raise EvaluationError(str(error)) from error
    loader = BatchLoader(dataset, batch_size=batch_size, collate_fn=collate_documents, shuffle=False, seed=0)
    device = model.tok_embeddings.weight.device
    total_loss = 0.0
    with evaluating(model), loss_fn.recorded() as outputs:
        for (batch,) in tqdm(loader, desc="Classifying", unit="batch", disable=None):
            batch = batch.to(device)
            hidden = model(**batch.model_inputs(), output="hidden")
            loss_sum, _ = loss_fn.sum_and_count(hidden, batch.labels, model.output, index=batch.label_index)
            total_loss += float(loss_sum)
    logits = torch.cat([batch_logits.cpu().double() for batch_logits, _ in outputs]).numpy()  # [n, c]
    targets = torch.cat([batch_targets.cpu().double() for _, batch_targets in outputs]).numpy()
    scores = classification_scores(task.problem_type, logits, targets)
    return ClassificationReport(rows=len(logits), loss=total_loss / len(logits), scores=scores)


def _task_of(model: TransformerDecoder) -> ClassificationTask:
    """Return the task of a classifier; classes without names are numbers."""
    description = getattr(model, "description", None)
    if description is None or not description.is_classifier:
        raise EvaluationError("model: it predicts tokens and has no classes: give a classifier.")
    problem_type = description.problem_type
    if problem_type is None:
        problem_type = REGRESSION if description.num_classes == 1 else SINGLE_LABEL
    if problem_type == REGRESSION:
        return ClassificationTask(REGRESSION)
    names = description.class_names or tuple(str(index) for index in range(description.num_classes))
    return ClassificationTask(problem_type, names)
