"""Set-up of a run that trains a classifier, and the scores of its validation."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchtune.data import BatchLoader, ExampleDataset
from torchtune.datasets import (
    REGRESSION,
    SINGLE_LABEL,
    ClassificationDataset,
    ClassificationTask,
    class_counts,
    describe_labels,
    describe_names,
)
from torchtune.modules.loss import ClassificationLoss, TokenLoss, innermost_loss
from torchtune.modules.transformer import text_decoder
from torchtune.training.parallel import ParallelDims
from torchtune.utils import UserError, get_logger, is_simulated, log_rank_zero


class ClassificationError(UserError):
    """Labels, model and loss of a run do not fit each other."""

    raised_on_all = True


class ClassificationScores:
    """Scores of a classifier over the validation data, from the outputs that its loss computes.

    Args:
        loss: the loss; None for a run that trains no classifier, which has no such scores.

    Example:
        >>> loss = torchtune.modules.loss.ClassificationLoss()
        >>> scores = torchtune.training.ClassificationScores(loss)
        >>> with scores.recorded():
        ...     logits, labels = torch.tensor([[[2.0, 1.0], [0.0, 3.0]]]), torch.tensor([[0, 1]])
        ...     _ = loss(logits, labels)
        ...
        >>> scores.over(torchtune.training.ParallelDims())
        {'val_accuracy': 1.0, 'val_f1': 1.0}
    """

    def __init__(self, loss: ClassificationLoss | None = None) -> None:
        self._loss = loss
        self._outputs: list[tuple[Tensor, Tensor]] = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the outputs of the validation inside the block."""
        if self._loss is None:
            yield
            return
        with self._loss.recorded() as outputs:
            yield
        self._outputs = outputs

    def over(self, dims: ParallelDims) -> dict[str, float]:
        """Return the scores of the recorded outputs of all ranks, with the prefix ``val_``. A collective."""
        if self._loss is None:
            return {}
        own_logits: list[np.ndarray] = []  # [n, c] of each batch
        own_targets: list[np.ndarray] = []
        for logits, targets in self._outputs:
            # In float64, because NumPy has no bfloat16.
            own_logits.append(logits.cpu().double().numpy())
            own_targets.append(targets.cpu().double().numpy())
        self._outputs = []  # frees the tensors on the device
        # Tensor-parallel ranks have the same rows; counting each several times changes no score.
        all_logits: list[np.ndarray] = []
        all_targets: list[np.ndarray] = []
        for rank_logits, rank_targets in dims.gather((own_logits, own_targets)):
            all_logits += rank_logits
            all_targets += rank_targets
        if not all_logits:  # no rank has validated
            return {}
        logits_of_all = np.concatenate(all_logits)  # [rows, c]
        targets_of_all = np.concatenate(all_targets)
        scores = classification_scores(self._loss.problem_type, logits_of_all, targets_of_all)
        return {f"val_{name}": score for name, score in scores.items()}


def classification_scores(problem_type: str, logits: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """Compute the scores of a classifier.

    Args:
        problem_type: ``single_label_classification``, ``multi_label_classification`` or ``regression``.
        logits: float ``[n, c]``.
        targets: the index of a class ``[n, 1]``, a 0 or 1 for each class ``[n, c]``, or a number ``[n, 1]``.

    Returns:
        ``accuracy`` (fraction of rows whose classes are all right) and ``f1`` (mean of the F1 of the classes; of one
        class per row, without classes that neither occur nor are predicted), or ``mae`` (mean absolute error) and
        ``r2`` (1 minus the squared error divided by that of the mean; absent if all targets are equal).

    Example:
        >>> import numpy as np
        >>> logits, targets = np.array([[2.0, 0.0], [0.0, 1.0], [3.0, 1.0]]), np.array([[0], [1], [1]])
        >>> scores = torchtune.training.classification_scores("single_label_classification", logits, targets)
        >>> round(scores["accuracy"], 3), round(scores["f1"], 3)
        (0.667, 0.667)
    """
    if problem_type == REGRESSION:
        errors = logits - targets
        scores = {"mae": float(np.abs(errors).mean())}
        spread = np.square(targets - targets.mean()).sum()
        if spread > 0:
            unexplained = np.square(errors).sum() / spread
            scores["r2"] = float(1 - unexplained)
        return scores
    if problem_type == SINGLE_LABEL:
        classes = np.arange(logits.shape[1])
        predicted = logits.argmax(-1)[:, None] == classes  # [n, c]
        expected = targets.astype(np.int64) == classes  # [n, c]
    else:
        predicted = logits > 0  # a probability above 1/2
        expected = targets > 0.5  # they are 0.0 and 1.0
    num_right = (predicted & expected).sum(0)  # [c]
    num_predicted_and_expected = predicted.sum(0) + expected.sum(0)  # [c]
    # F1 is 2 · right / (predicted + expected); a class that neither occurs nor is predicted has 0.
    f1 = 2 * num_right / np.maximum(num_predicted_and_expected, 1)
    if problem_type == SINGLE_LABEL:
        f1 = f1[num_predicted_and_expected > 0]
    is_right = (predicted == expected).all(-1)  # [n]
    return {"accuracy": float(is_right.mean()), "f1": float(f1.mean())}


def setup_classification(
    model: nn.Module, loss: TokenLoss, loader: BatchLoader, loader_val: BatchLoader | None = None
) -> ClassificationScores:
    """Give labels, loss and model of a run the same classes, if it trains a classifier.

    The names of the classes are those of ``labels`` of the training data, of the model, or found in the training data.
    The model's description then has them, so that checkpoints have ``id2label`` and ``problem_type``.

    Args:
        model: the model, with its weights.
        loss: from :func:`torchtune.modules.loss.setup_loss`.
        loader: loader of the training data.
        loader_val: loader of the validation data.

    Returns:
        The scores of the validation; without any if no data is of
        :func:`torchtune.datasets.classification_dataset`.

    Raises:
        ClassificationError: only some of the data has labels, the loss or the model is of another task, the labels
            have one class, or the number of classes differs from the model's outputs.
        DataError: a row has a class that is not one of the classes.

    Example:
        >>> from torchtune.data import BatchLoader, collate_documents
        >>> rows = [{"tokens": [5, 6], "labels": [6, -100]}]
        >>> loader = BatchLoader(rows, batch_size=1, collate_fn=collate_documents, shuffle=False, seed=0)
        >>> loss = torchtune.modules.loss.LinearCrossEntropyLoss()
        >>> torchtune.training.setup_classification(model, loss, loader).over(torchtune.training.ParallelDims())
        {}
    """
    if is_simulated():  # the rows of a simulated run have no labels of their own
        return ClassificationScores()
    decoder = text_decoder(model)
    description = getattr(decoder, "description", None)  # a model of the user's own has none
    num_outputs = 0
    class_names: tuple[str, ...] = ()
    if description is not None:
        num_outputs = description.num_classes
        class_names = description.class_names
    datasets = loader.dataset.row_datasets()
    datasets_val: Sequence[ExampleDataset] = []
    if loader_val is not None:
        datasets_val = loader_val.dataset.row_datasets()
    classification_loss = innermost_loss(loss)
    task = find_task(datasets, datasets_val, classification_loss, num_outputs=num_outputs, class_names=class_names)
    if task is None:
        return ClassificationScores()
    number_targets(task, [*datasets, *datasets_val], classification_loss)
    # A model without a description has no outputs for any task, which find_task has refused.
    decoder.description = replace(description, class_names=task.class_names, problem_type=task.problem_type)
    values: list[Any] = []  # of all rows
    for dataset in datasets:
        values += dataset.values
    log_rank_zero(get_logger(), f"{describe_labels(task, values)}.")
    return ClassificationScores(classification_loss)


def find_task(
    datasets: Sequence[ExampleDataset],
    datasets_val: Sequence[ExampleDataset],
    loss: nn.Module,
    *,
    num_outputs: int,
    class_names: tuple[str, ...] = (),
) -> ClassificationTask | None:
    """Return the task of a classifier, after checking that data, loss and model have the same.

    Args:
        datasets: datasets of rows of the training data.
        datasets_val: those of the validation data; may be empty.
        loss: the loss of the config.
        num_outputs: number of outputs of the model's head; 0 for a language model.
        class_names: names of the classes that the model has from an earlier run.

    Returns:
        None if no data has labels.

    Raises:
        ClassificationError: see :func:`setup_classification`.
        DataError: a row of the validation data has another class.
    """
    labeled = [dataset for dataset in datasets if isinstance(dataset, ClassificationDataset)]
    labeled_val = [dataset for dataset in datasets_val if isinstance(dataset, ClassificationDataset)]
    if not labeled and not labeled_val:
        if isinstance(loss, ClassificationLoss):
            raise ClassificationError(
                "loss: ClassificationLoss needs rows with labels: set dataset._component_ to "
                "torchtune.datasets.classification_dataset."
            )
        return None
    if len(labeled) < len(datasets) or len(labeled_val) < len(datasets_val):
        raise ClassificationError(
            "dataset: some of the data is of classification_dataset and some is not: use it for all datasets, and for "
            "dataset_val."
        )
    if not isinstance(loss, ClassificationLoss):
        raise ClassificationError(
            f"loss: {type(loss).__name__} predicts tokens, but the rows have labels: set loss._component_ to "
            "torchtune.modules.loss.ClassificationLoss."
        )
    task = _task_of(labeled, class_names)
    _check_outputs(num_outputs, task)
    for dataset in [*labeled, *labeled_val]:
        dataset.targets_for(task)  # raises for a class that the task lacks
    return task


def number_targets(
    task: ClassificationTask, datasets: Sequence[ClassificationDataset], loss: ClassificationLoss
) -> None:
    """Give the datasets and the loss one table of the distinct targets of all rows.

    Raises:
        DataError: a row has a label that is not of the task; the message names the row.
    """
    targets: set[tuple[float, ...]] = set()
    for dataset in datasets:
        targets.update(dataset.targets_for(task))
    table = sorted(targets)
    for dataset in datasets:
        dataset.set_targets(task, table)
    loss.set_targets(task.problem_type, torch.tensor(table, dtype=torch.float32))


def _task_of(labeled: Sequence[ClassificationDataset], class_names: tuple[str, ...]) -> ClassificationTask:
    """Return the task of the training data, with names from ``labels``, the model or the data, in this order."""
    named_tasks: set[ClassificationTask] = set()
    problem_types: set[str] = set()
    values: list[Any] = []  # labels of all rows
    for dataset in labeled:
        if dataset.has_own_names:
            named_tasks.add(dataset.task)
        problem_types.add(dataset.task.problem_type)
        values += dataset.values
    if len(named_tasks) > 1 or len(problem_types) > 1:
        raise ClassificationError(
            "dataset: the datasets have different labels or problem types: give all of them the same labels."
        )
    (problem_type,) = problem_types
    first_label = values[0]
    are_equal = all(value == first_label for value in values)
    # Rows of one class, and rows without classes ([]), get messages of their own below.
    if problem_type != SINGLE_LABEL and are_equal and first_label != []:
        raise ClassificationError(
            f"dataset: all rows have the label {first_label!r}, from which nothing can be learned: give rows with "
            "other labels."
        )
    if problem_type == REGRESSION:
        return ClassificationTask(REGRESSION)
    counts = class_counts(values)  # rows of each class
    if not counts:
        raise ClassificationError("dataset: no row has a class: give rows with classes.")
    if len(counts) < 2 and problem_type == SINGLE_LABEL:
        (class_name,) = counts
        raise ClassificationError(
            f"dataset: all rows have the class '{class_name}', from which nothing can be learned: give rows of "
            "at least two classes."
        )
    if named_tasks:
        (task,) = named_tasks
        return task
    # A head that has all classes of the data keeps their order, which is that of its trained outputs.
    if class_names and counts.keys() <= set(class_names):
        return ClassificationTask(problem_type, class_names)
    return ClassificationTask(problem_type, tuple(counts))


def _check_outputs(num_outputs: int, task: ClassificationTask) -> None:
    """Raise if a model of ``num_outputs`` (0: a language model) has no head for the task."""
    if num_outputs == task.num_outputs:
        return
    if task.problem_type == REGRESSION:
        needed = "a regression needs 1 output"
    else:
        needed = f"the labels have {task.num_outputs:,} classes ({describe_names(task.class_names)})"
    if not num_outputs:
        raise ClassificationError(
            f"model: {needed}, but the model predicts tokens: set model._component_ to "
            f"torchtune.modules.classifier_model with num_classes={task.num_outputs} and base_model_path the builder."
        )
    raise ClassificationError(
        f"model: {needed}, but the model's head has {num_outputs:,}: set num_classes={task.num_outputs}, or name the "
        "classes of the head in order with labels of the dataset."
    )
