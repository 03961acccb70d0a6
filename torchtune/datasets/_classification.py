"""Rows of texts or conversations with labels: a class, several classes, or a number."""

import json
import math
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, DataError, as_messages, kind_of, truncate, warn_of_row_weight
from torchtune.datasets._packed import PackedDataset, pack_length
from torchtune.datasets._row_formats import CONVERSATION_FORMATS, LABELED_TEXTS
from torchtune.datasets._row_source import RowSource, Source
from torchtune.datasets._tokenized import Tokenize, TokenizedDataset, prepare_rows
from torchtune.tokenizers import BaseTokenizer, check_tokenizer

# As config.json names them.
ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
SINGLE_LABEL: ProblemType = "single_label_classification"
MULTI_LABEL: ProblemType = "multi_label_classification"
REGRESSION: ProblemType = "regression"
_PROBLEM_TYPES = (SINGLE_LABEL, MULTI_LABEL, REGRESSION)

# A label as plain data: a class, a list of classes, or a number.
LabelValue = str | int | float | bool | list[Any]


@dataclass(frozen=True)
class ClassificationTask:
    """The outputs of a classifier, and their meaning.

    Attributes:
        problem_type: ``single_label_classification``, ``multi_label_classification`` or ``regression``.
        class_names: name of each class, in the order of the outputs; empty for a regression.

    Example:
        >>> task = torchtune.datasets.ClassificationTask("single_label_classification", ("ham", "spam"))
        >>> task.num_outputs, task.target("spam")
        (2, (1.0,))
    """

    problem_type: ProblemType
    class_names: tuple[str, ...] = ()

    @property
    def num_outputs(self) -> int:
        """Number of outputs of the model: of classes, or 1 for a regression."""
        if self.problem_type == REGRESSION:
            return 1
        return len(self.class_names)

    def target(self, value: LabelValue) -> tuple[float, ...]:
        """Return the target of a label: the index of its class, a 0 or 1 for each class, or a number.

        Raises:
            DataError: a class is not one of :attr:`class_names`, or the label is of another kind.
        """
        if self.problem_type == REGRESSION:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise DataError(f"the label {value!r} is not a number, as a regression needs")
            return (float(value),)
        if self.problem_type == SINGLE_LABEL:
            if isinstance(value, list):
                raise DataError(f"the label {value!r} is a list, but the rows have one class each")
            return (float(self._index(value)),)
        if not isinstance(value, list):
            raise DataError(f"the label {value!r} is not a list, but the rows have lists of classes")
        target = [0.0] * len(self.class_names)
        for item in value:
            target[self._index(item)] = 1.0
        return tuple(target)

    def _index(self, value: Any) -> int:
        name = class_name(value)
        if name not in self.class_names:
            raise DataError(f"the class '{name}' is not one of {describe_names(self.class_names)}")
        return self.class_names.index(name)


def class_name(value: Any) -> str:
    """Return the name of a class, which a row or a setting writes as a text, a whole number or a bool."""
    if isinstance(value, bool):  # as JSON and YAML write it
        return str(value).lower()
    return str(value)


def describe_names(names: Sequence[str]) -> str:
    """Return up to ten names for a message."""
    text = ", ".join(names[:10])
    if len(names) > 10:
        text += f", … ({len(names):,})"
    return text


def _number_in_text(value: LabelValue) -> LabelValue:
    """Return the number that a text says; other values are unchanged."""
    if not isinstance(value, str):
        return value
    try:
        number = float(value)
    except ValueError:
        return value
    if not math.isfinite(number):  # "nan" and "inf" are texts
        return value
    return number


def problem_type_of(values: Sequence[LabelValue]) -> ProblemType:
    """Return the problem type of labels: lists are several classes, fractions a regression, all others classes.

    Raises:
        DataError: the labels are of different kinds.
    """
    examples: dict[str, LabelValue] = {}  # kind -> a label
    for value in values:
        kind = "whole numbers"  # also bools
        if isinstance(value, list):
            kind = "lists"
        elif isinstance(value, str):
            kind = "texts"
        elif isinstance(value, float):
            kind = "numbers"
        examples.setdefault(kind, value)
    # Of a column with fractions, some values may be whole: {0.5, 1} are numbers.
    is_regression = "numbers" in examples and examples.keys() <= {"numbers", "whole numbers"}
    if is_regression:
        return REGRESSION
    if len(examples) > 1:
        described = " and ".join(f"{kind} (such as {value!r})" for kind, value in examples.items())
        raise DataError(f"the labels are of mixed types, {described}: write all labels as one of them")
    if "lists" in examples:
        return MULTI_LABEL
    return SINGLE_LABEL


def class_counts(values: Sequence[LabelValue]) -> dict[str, int]:
    """Count the rows of each class, whole numbers in their order, other classes by name."""
    counts: Counter[Any] = Counter()
    for value in values:
        if isinstance(value, list):
            counts.update(value)
        else:
            counts[value] += 1
    are_numbers = all(isinstance(value, int) for value in counts)
    if are_numbers:
        classes = sorted(counts)  # 10 after 9
    else:
        classes = sorted(counts, key=class_name)
    return {class_name(value): counts[value] for value in classes}


def describe_labels(task: ClassificationTask, values: Sequence[LabelValue]) -> str:
    """Return a text with the number of rows of each class, or the range of numbers."""
    if task.problem_type == REGRESSION:
        return f"regression on {len(values):,} rows with labels from {min(values)} to {max(values)}"
    counts = class_counts(values)
    first_classes = [f"{name} {counts.get(name, 0):,}" for name in task.class_names[:10]]
    if len(task.class_names) > 10:
        first_classes.append("…")
    listed = ", ".join(first_classes)
    return f"{len(task.class_names):,} classes in {len(values):,} rows ({task.problem_type}): {listed}"


def _column(row: Mapping[str, Any], setting: str, name: str) -> Any:
    """Return a column of a row. Raises :class:`DataError` with the setting that names it, if it is missing."""
    if name not in row:
        raise DataError(f"there is no column '{name}' among {', '.join(map(str, row))}: set {setting} to one of them")
    return row[name]


class ClassificationTransform:
    """Converts a row to tokens, a mark at the last of them, and its label; see :class:`ClassificationDataset`."""

    def __init__(
        self, tokenizer: Any, text_column: str, label_column: str, add_eos: bool, max_seq_len: int | None
    ) -> None:
        check_tokenizer(tokenizer, "encode", reader="a dataset of labeled texts")
        self._tokenizer = tokenizer
        # Control tokens in a text are plain text; tokenizers without `encode_text` never parse them.
        self._encode = getattr(tokenizer, "encode_text", tokenizer.encode)
        self._text_column = text_column
        self._label_column = label_column
        self._add_eos = add_eos
        self.limit = max_seq_len or getattr(tokenizer, "max_seq_len", None)

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``tokens``, ``labels`` with 0 at the last token, and the label as ``note``.

        Raises:
            DataError: the row has no text or no label.
        """
        warn_of_row_weight(row, "a dataset of labeled texts")
        tokens = self.tokens(_column(row, "column", self._text_column))
        if not tokens:
            raise DataError(f"column '{self._text_column}' holds no text")
        labels = [CROSS_ENTROPY_IGNORE_IDX] * len(tokens)
        labels[-1] = 0  # a mark: the dataset writes the number of the target here
        return {"tokens": tokens, "labels": labels, "note": self._label(row)}

    def tokens(self, text: Any) -> list[int]:
        """Return the tokens of a text or of a conversation, cut to the limit on the right."""
        if isinstance(text, str):
            tokens = self._encode(text=text, add_bos=True, add_eos=self._add_eos)
        elif isinstance(text, list) and text:
            tokens, _ = self._tokenizer.tokenize_messages(as_messages(text))
        else:
            raise DataError(f"column '{self._text_column}' holds {kind_of(text)}, not a text or a list of messages")
        tokens = [int(token) for token in tokens]
        if self.limit is None:
            return tokens
        return truncate(tokens, self.limit)

    def _label(self, row: Mapping[str, Any]) -> LabelValue:
        """Return the label of a row as plain data, for the notes of the store, which are JSON.

        An empty list is the label of a row to which no class applies.

        Raises:
            DataError: the label is missing, not finite, or a list with a fraction.
        """
        value = _column(row, "label_column", self._label_column)
        if isinstance(value, np.ndarray | tuple):
            value = list(value)
        items = [value]
        if isinstance(value, list):
            items = value
        for item in items:
            if not isinstance(item, str | int | float) or (isinstance(item, float) and not math.isfinite(item)):
                described = "nothing"
                if item is not None:
                    described = f"{item!r:.40}"
                raise DataError(
                    f"column '{self._label_column}' holds {described}, not a class, a list of classes or a number"
                )
            if isinstance(item, float) and isinstance(value, list):
                raise DataError(f"column '{self._label_column}' is a list with {item!r}, which names no class")
        return value


class ClassificationDataset(TokenizedDataset):
    """Dataset of texts or conversations with labels, for models with a classification head.

    The head is read at the last token of a row, so that rows are packed without padding. The label there is the number
    of the row's target in the table of the loss; :meth:`set_targets` sets both. Before that call it is the number of
    the target in :attr:`targets`.

    A label is a class (a text, a whole number or a bool), a list of classes (several may be right), or a fraction (a
    regression).

    Args:
        tokenizer: tokenizer of the model; it has ``encode``, and ``tokenize_messages`` for conversations.
        source: Hub dataset, folder, file, loader name, or rows in memory.
        column: column of the text, or of a list of messages.
        label_column: column of the label.
        labels: names of the classes in the order of the model's outputs; by default those of the model, or of the data.
        problem_type: ``single_label_classification``, ``multi_label_classification`` or ``regression``; by default it
            follows from the labels.
        add_eos: end a text with the EOS token; conversations end as the chat template says.
        filter_fn: function of a row; rows for which it returns False are dropped.
        max_seq_len: rows are truncated to it, on the right; by default the tokenizer's.
        **load_dataset_kwargs: passed to ``datasets.load_dataset``.

    Attributes:
        task: the classes, from ``labels`` or the data.
        values: label of each row, as plain data.
        has_own_names: whether ``labels`` sets the names.

    Raises:
        DataError: the data cannot be loaded, has no rows, has rows without a text or a label (listed by number), or has
            labels of mixed types, or a class that is not in ``labels``.

    Example:
        >>> rows = [{"text": "the cat", "label": "animal"}, {"text": "a red one", "label": "color"}]
        >>> data = torchtune.datasets.ClassificationDataset(tokenizer, rows)
        >>> data.task.class_names, data.counts
        (('animal', 'color'), {'animal': 1, 'color': 1})
    """

    def __init__(
        self,
        tokenizer: BaseTokenizer,
        source: Source,
        column: str = "text",
        label_column: str = "label",
        labels: Sequence[str | int | bool] | None = None,
        problem_type: ProblemType | None = None,
        add_eos: bool = False,
        filter_fn: Callable[..., bool] | None = None,
        max_seq_len: int | None = None,
        **load_dataset_kwargs: Any,
    ) -> None:
        if load_dataset_kwargs.get("streaming"):
            raise DataError(
                "classification_dataset reads all labels before training, to know the classes: leave out streaming."
            )
        if problem_type is not None and problem_type not in _PROBLEM_TYPES:
            raise DataError(f"problem_type is '{problem_type}': choose one of {', '.join(_PROBLEM_TYPES)}.")
        transform = ClassificationTransform(tokenizer, column, label_column, add_eos, max_seq_len)
        row_source = RowSource(source, filter_fn=filter_fn, **load_dataset_kwargs)
        rows = prepare_rows(
            row_source,
            Tokenize(transform, limit=transform.limit, has_notes=True),  # the notes are the labels
            # Without labels and problem_type: they change only the targets, which are not stored.
            depends_on={
                "dataset": type(self),
                "tokenizer": tokenizer,
                "column": column,
                "label_column": label_column,
                "add_eos": add_eos,
                "limit": transform.limit,
            },
            formats=(LABELED_TEXTS, *CONVERSATION_FORMATS.values()),
        )
        self.values: list[LabelValue] = list(rows.notes)
        super().__init__(row_source, rows, limit=transform.limit)
        self.has_own_names = labels is not None
        self.task = self._make_task(labels, problem_type)
        try:  # the dataset's own table, until the recipe sets that of the model and the loss
            targets = sorted(set(self._row_targets(self.task)))
            self.set_targets(self.task, targets)
        except DataError as error:
            raise DataError(f"{self.source}, {error}: add it to labels, or correct the row.") from error

    def _make_task(self, labels: Sequence[Any] | None, problem_type: ProblemType | None) -> ClassificationTask:
        """Return the task of the dataset; of a regression, also read labels that are texts as numbers."""
        try:
            problem_type = problem_type or problem_type_of(self.values)
        except DataError as error:
            raise DataError(f"{self.source}: {error}.") from error
        if problem_type == REGRESSION:
            self.values = [_number_in_text(value) for value in self.values]  # every cell of a table is a text
            if labels is not None:
                raise DataError(f"{self.source}: labels names classes, but a regression has none: leave it out.")
            return ClassificationTask(REGRESSION)
        if labels is None:
            names = tuple(self.counts)
        else:
            names = tuple(class_name(label) for label in labels)
        duplicates = [name for name, count in Counter(names).items() if count > 1]
        if duplicates:
            raise DataError(f"{self.source}: labels has '{duplicates[0]}' twice: name each class once.")
        return ClassificationTask(problem_type, names)

    def _row_targets(self, task: ClassificationTask) -> list[tuple[float, ...]]:
        """Return the target of each row. Raises :class:`DataError` with the number of the first row without one."""
        targets = []
        for number, value in zip(self._numbers.tolist(), self.values, strict=True):
            try:
                targets.append(task.target(value))
            except DataError as error:
                raise DataError(f"row {number}: {error}") from error
        return targets

    @property
    def counts(self) -> dict[str, int]:
        """Number of rows of each class; of each value for a regression."""
        return class_counts(self.values)

    def targets_for(self, task: ClassificationTask) -> list[tuple[float, ...]]:
        """Return the distinct targets of the rows, sorted.

        Args:
            task: the classes of the model.

        Raises:
            DataError: a row has a label that is not of the task; the message names the row.
        """
        try:
            return sorted(set(self._row_targets(task)))
        except DataError as error:
            raise DataError(
                f"{self.source}, {error}: correct the row, or name every class with labels of the training data."
            ) from error

    def set_targets(self, task: ClassificationTask, targets: Sequence[tuple[float, ...]]) -> None:
        """Number the labels of the rows by a table of targets.

        Args:
            task: the classes of the model.
            targets: the table, which has the target of every row.
        """
        self.task = task
        self.targets = list(targets)
        number_of_target = {target: number for number, target in enumerate(targets)}
        numbers = [number_of_target[target] for target in self._row_targets(task)]
        self._target_numbers = np.array(numbers, np.int64)

    def _keep(self, rows: np.ndarray) -> None:
        super()._keep(rows)
        self.values = [self.values[row] for row in rows.tolist()]
        self._target_numbers = self._target_numbers[rows]

    @property
    def fingerprint(self) -> Any:
        """Digest of all tokens and labels, and of the classes."""
        task = [self.task.problem_type, *self.task.class_names]
        return [self.store.fingerprint, zlib.crc32(json.dumps(task).encode())]

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return ``tokens``, and ``labels`` with the number of the row's target at the last token."""
        row = super().__getitem__(index)
        row["labels"][-1] = int(self._target_numbers[index])
        return row

    def token_row(self, index: int) -> dict[str, Any]:
        """See :class:`torchtune.data.ExampleDataset`."""
        return self[index]


def classification_dataset(
    tokenizer: BaseTokenizer,
    source: Source,
    column: str = "text",
    label_column: str = "label",
    labels: Sequence[str | int | bool] | None = None,
    problem_type: ProblemType | None = None,
    add_eos: bool = False,
    packed: bool = False,
    split: str = "train",
    filter_fn: Callable[..., bool] | None = None,
    max_seq_len: int | None = None,
    **load_dataset_kwargs: Any,
) -> ClassificationDataset | PackedDataset:
    """Build a dataset of labeled texts or conversations; see :class:`ClassificationDataset`.

    Args:
        tokenizer: tokenizer of the model.
        source: Hub dataset, folder, file, loader name (``json``, ``csv`` …), or rows in memory.
        column: column of the text, or of a list of messages.
        label_column: column of the label: a class, a list of classes, or a number.
        labels: names of the classes in the order of the model's outputs; by default those of the model, or of the data.
        problem_type: ``single_label_classification``, ``multi_label_classification`` or ``regression``; by default it
            follows from the labels.
        add_eos: end a text with the EOS token.
        packed: pack rows.
        split: split of the dataset.
        filter_fn: function of a row; rows for which it returns False are dropped.
        max_seq_len: maximum row or pack length in tokens; by default the tokenizer's.
        **load_dataset_kwargs: passed to ``datasets.load_dataset``, for example ``data_files``.

    Raises:
        DataError: ``packed`` is True but there is no ``max_seq_len``; further cases in :class:`ClassificationDataset`.

    Example:
        >>> rows = [{"text": "the cat", "label": "animal"}, {"text": "a red one", "label": "color"}]
        >>> data = torchtune.datasets.classification_dataset(tokenizer, source=rows)
        >>> [row["labels"][-1] for row in data]
        [0, 1]
    """
    length = None
    if packed:  # fails before the rows are tokenized
        length = max_seq_len or pack_length(tokenizer)
    dataset = ClassificationDataset(
        tokenizer=tokenizer,
        source=source,
        column=column,
        label_column=label_column,
        labels=labels,
        problem_type=problem_type,
        add_eos=add_eos,
        filter_fn=filter_fn,
        max_seq_len=max_seq_len,
        split=split,
        **load_dataset_kwargs,
    )
    if length is None:
        return dataset
    return PackedDataset(dataset, max_seq_len=length)
