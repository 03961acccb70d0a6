"""Datasets for supervised fine-tuning: rows -> messages -> tokens and labels."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from torchtune.data import DataError, Message, Transform, as_messages, check_tokenizer, copy_sample, validate_messages
from torchtune.datasets._bad_rows import BadRows, say_what_is_left_out
from torchtune.datasets._fingerprint import Fingerprint
from torchtune.datasets._row_images import check_images, check_rows, encoded, images_of, row_error, with_images
from torchtune.datasets._row_source import RowSource, Source
from torchtune.datasets._shared import is_preparing, prepare
from torchtune.datasets._token_store import RowWriter, TokenStore, shifted_labels
from torchtune.datasets._tokenize import OnReading, TransformRows, tokenize_rows
from torchtune.tokenizers import arrays_of
from torchtune.utils import get_logger, log_rank_zero


class SFTTransform(Transform):
    """Converts a row to tokens and pre-shifted labels.

    Args:
        message_transform: row -> ``messages``; ``None`` if the rows have them.
        model_transform: ``messages`` -> ``tokens`` and ``mask``, usually a tokenizer.

    Example:
        >>> transform = torchtune.datasets.SFTTransform(torchtune.data.OpenAIToMessages(), tokenizer)
        >>> turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "one"}]
        >>> row = transform({"messages": turns})
        >>> len(row["tokens"]) == len(row["labels"])
        True
    """

    def __init__(self, message_transform: Transform | None = None, model_transform: Transform | None = None) -> None:
        check_tokenizer(model_transform)
        self.message_transform = message_transform
        self.model_transform = model_transform

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``tokens``, ``labels`` and further outputs of the transforms.

        Raises:
            DataError: a transform rejects the row.
        """
        return self._transformed(sample, lambda transform, messages: transform(messages))

    def as_arrays(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``self(sample)``, with arrays instead of lists if the model transform supports them."""
        return self._transformed(sample, arrays_of)

    def all_arrays(self, sample: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return a result of :meth:`as_arrays` for each conversation that the tokenizer makes of the row."""
        sample = self.messages(sample)
        parts = self.model_transform.conversations(sample["messages"])
        return [self._tokenized({**sample, "messages": part}, arrays_of) for part in parts]

    def _transformed(self, sample: Mapping[str, Any], tokenize: Callable[..., Any]) -> dict[str, Any]:
        return self._tokenized(self.messages(sample), tokenize)

    def _tokenized(self, sample: Mapping[str, Any], tokenize: Callable[..., Any]) -> dict[str, Any]:
        if self.model_transform is not None:
            sample = tokenize(self.model_transform, with_images(sample))
        sample = copy_sample(sample, "the model transform")
        if "tokens" not in sample or "mask" not in sample:
            raise DataError(
                f"the model transform gives {', '.join(map(str, sample)) or 'nothing'}, but 'tokens' and 'mask' are "
                "needed"
            )
        sample["labels"] = shifted_labels(sample["tokens"], sample.pop("mask"))
        return sample

    def messages(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return the input of the model transform, with images as in the row; raise :class:`DataError` if invalid."""
        if self.message_transform is None:
            return dict(sample)
        sample = copy_sample(self.message_transform(sample), "message_transform")
        if "messages" in sample:
            sample["messages"] = as_messages(sample["messages"])
            validate_messages(sample["messages"])
        return sample

    def text(self, sample: Mapping[str, Any], decode: bool = False) -> dict[str, Any]:
        """Return ``tokens``, ``labels`` and, as ``note``, the result of :func:`check_images`, without decoded images.

        Image files are opened, and decoded if ``decode``. Raises :class:`DataError`.
        """
        sample = self.messages(sample)
        images = check_images(sample, decode)
        if "messages" not in sample:
            raise DataError(f"the message transform gives {', '.join(map(str, sample)) or 'nothing'}, not 'messages'")
        tokens, mask = self.model_transform.tokenize_messages(sample["messages"])
        return {"tokens": tokens, "labels": shifted_labels(tokens, mask), "note": images}


def row_numbers(
    skipped: Sequence[tuple[int, str]], rows: int, source: str, several: Mapping[int, int] | None = None
) -> np.ndarray:
    """Return the number in its source of each row, int64 ``[rows]``; log a warning about skipped rows.

    ``several`` has the number of samples of each source row that gives more than one.
    """
    counts = np.ones(rows + len(skipped) - sum((several or {}).values()) + len(several or {}), np.int64)
    counts[[row for row, _ in skipped]] = 0
    for row, count in (several or {}).items():
        counts[row] = count
    say_what_is_left_out(skipped, source, len(counts))
    return np.repeat(np.arange(len(counts)), counts)


def say_what_is_cut(cut: int, rows: int, source: str, limit: int | None) -> None:
    """Log a warning if rows may have been truncated; also if they were prepared earlier."""
    if cut:
        said = f"{cut} of {rows} rows of {source} are as long as max_seq_len={limit} or were cut to it."
        log_rank_zero(get_logger(), said, logging.WARNING)


class SFTDataset(Dataset):
    """Dataset for supervised fine-tuning, tokenized at construction.

    One process per machine tokenizes, and all processes map its files into memory. Later runs with the same data,
    tokenizer and settings reuse them. For this, transforms and filters from outside this library need an attribute
    ``fingerprint``, a text that changes when they do.

    Data errors are raised before training starts. Transforms that return more than tokens (images) are applied whenever
    a row is read. In this case, if the ``model_transform`` can tokenize text alone (it has ``takes_images``), the text
    of all rows is tokenized before training, and every image file is opened.

    ``on_bad_row=skip`` skips rows that cannot be trained on, and lists them in the run's ``skipped_rows.jsonl``. It
    decodes every image once before training.

    Args:
        source: Hub dataset, folder, file, loader name (``json``, ``csv``, ``parquet`` …), or rows in memory: a
            ``datasets.Dataset`` or an iterable of mappings.
        message_transform: row -> ``messages``.
        model_transform: ``messages`` -> ``tokens`` and ``mask``, usually a tokenizer.
        filter_fn: function of a row; rows for which it returns False are dropped.
        filter_kwargs: passed to ``datasets.Dataset.filter``.
        **load_dataset_kwargs: passed to ``datasets.load_dataset``; ``prepared``: an output folder of ``tune data
            prepare``.

    Attributes:
        on_reading: whether rows are transformed when they are read.
        num_images: number of images in all rows; ``None`` for text.

    Raises:
        DataError: the data cannot be loaded, has no rows, or has rows that cannot be trained on (listed by number);
            ``prepared`` was made from other rows.

    Example:
        >>> rows = [{"question": "Who?", "answer": "one cat"}]
        >>> transform = torchtune.data.InputOutputToMessages(column_map={"input": "question", "output": "answer"})
        >>> data = torchtune.datasets.SFTDataset(source=rows, message_transform=transform, model_transform=tokenizer)
        >>> tokenizer.decode([label for label in data[0]["labels"] if label != -100])
        'one cat'
    """

    def __init__(
        self,
        *,
        source: Source,
        message_transform: Transform,
        model_transform: Transform,
        filter_fn: Callable[..., bool] | None = None,
        filter_kwargs: Mapping[str, Any] | None = None,
        **load_dataset_kwargs: Any,
    ) -> None:
        self._transform = SFTTransform(message_transform, model_transform)
        found = RowSource(source, filter_fn=filter_fn, filter_kwargs=filter_kwargs, **load_dataset_kwargs)
        self.source, self._found = found.shown, found
        limit, side = (
            getattr(model_transform, "max_seq_len", None),
            getattr(model_transform, "truncation_type", "right"),
        )
        transforms = {"masks and columns": message_transform, "tokenizer": model_transform}
        fingerprint = Fingerprint({"dataset": type(self), **transforms})
        found.add_to(fingerprint)
        takes_images = bool(getattr(model_transform, "takes_images", False))
        if takes_images and found.skips and not is_preparing():
            fingerprint.is_exact = False  # it does not cover which images are broken

        def build(writer: RowWriter) -> dict[str, Any] | None:
            transform, rows = self._transform.as_arrays, found.rows()
            if getattr(model_transform, "reasoning", None) == "split":
                transform = self._transform.all_arrays
            if takes_images:
                transform, rows = partial(self._transform.text, decode=found.skips), encoded(rows, message_transform)
            work = TransformRows(transform, limit, side, notes=takes_images)
            bad = BadRows(found.shown, rows=found.rows(), drop=found.skips, switch="on_bad_row=skip")
            try:
                tokenize_rows(rows, work, bad, writer)
            except OnReading:
                return self._checked(found)
            return None

        rows = prepare(fingerprint, self.source, build, found.prepared)
        checked = rows.info.get("on_reading")
        self.on_reading = takes_images or checked is not None
        notes, skipped = (rows.notes, rows.bad) if checked is None else checked
        self.num_images: int | None = sum(count for count, _ in notes) if self.on_reading else None
        self._rows = encoded(found.rows(), message_transform) if self.on_reading else None
        self.store: TokenStore | None = rows.store("rows") if checked is None else None
        self._skips = found.skips
        kept = len(self._rows) - len(skipped) if self.store is None else len(self.store)
        self._numbers = row_numbers(skipped, kept, self.source, rows.several)
        if self.store is not None:
            say_what_is_cut(rows.cut, len(self), self.source, limit)

    def _checked(self, found: RowSource) -> dict[str, Any]:
        """Check the images of rows if the model transform is not one of this library's."""
        bad = BadRows(found.shown, rows=found.rows(), drop=found.skips, switch="on_bad_row=skip")
        rows = encoded(found.rows(), self._transform.message_transform)
        notes = check_rows(rows, lambda row: check_images(self._transform.messages(row), found.skips), bad)
        return {"on_reading": [notes, bad.left_out]}

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each row, int64 ``[rows]``."""
        if self.store is None:
            return np.array([len(self[index]["tokens"]) for index in range(len(self))])
        return self.store.lengths

    @property
    def image_tokens(self) -> np.ndarray | None:
        """Number of tokens of images in each row, int64 ``[rows]``; ``None`` if the model has no such tokens."""
        ids = getattr(self._transform.model_transform, "image_tokens", None)
        return None if self.store is None or ids is None else self.store.count(list(ids))

    @property
    def fingerprint(self) -> int | None:
        """Changes with any token, label or image name; ``None`` if rows are tokenized when they are read."""
        return None if self.store is None else self.store.fingerprint

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return ``tokens`` and pre-shifted ``labels`` as lists, and further outputs of the transform.

        Raises:
            DataError: an image cannot be read, which was not detected before.
        """
        if not self.on_reading:
            tokens, labels = self.store.arrays(index)
            return {"tokens": tokens.tolist(), "labels": labels.tolist()}
        row = int(self._numbers[index])
        try:
            return self._transform(self._rows[row])
        except DataError as error:
            raise row_error(error, self.source, row, self._rows, self._skips) from error

    def conversations(self) -> Iterator[list[Message]]:
        """Yield the messages of each row of the source; none for a row that the message transform rejects."""
        for row in self._found.rows():
            try:
                yield self._transform.messages(row)["messages"]
            except DataError:
                yield []

    def images(self, index: int) -> list[Any]:
        """Return the images of a row as they are stored: paths, URLs, bytes or images."""
        if not self.on_reading:
            return []
        return images_of(self._transform.messages(self._rows[int(self._numbers[index])]))

    def origins(self, index: int) -> list[dict[str, Any]]:
        """Return ``source`` and ``row`` (counted from 0, after ``filter_fn``) of an example."""
        return [{"source": self.source, "row": int(self._numbers[index])}]

    def document(self, index: int, start: int = 0, end: int | None = None) -> dict[str, torch.Tensor]:
        """Return int64 ``tokens`` and ``labels`` of a row, or of a slice of it."""
        return document_of(self, index, start, end)


def document_of(dataset: Any, index: int, start: int = 0, end: int | None = None) -> dict[str, torch.Tensor]:
    """Return int64 ``tokens`` and ``labels`` of a row, or of a slice of it, for any map-style dataset."""
    store = getattr(dataset, "store", None)
    if store is not None:
        return store.document(index, start, end)
    row = dataset[index]
    return {key: torch.as_tensor(row[key], dtype=torch.int64)[start:end] for key in ("tokens", "labels")}
