"""Supervised fine-tuning: rows -> messages -> tokens and labels."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from torchtune.data import DataError, Transform, as_messages, validate_messages
from torchtune.data._common import as_sample, check_tokenizer
from torchtune.datasets._bad_rows import BadRows, say_what_is_left_out
from torchtune.datasets._fingerprint import Fingerprint
from torchtune.datasets._images import check_images, check_rows, encoded, images_of, row_error, summary, with_images
from torchtune.datasets._load import RowSource, Source
from torchtune.datasets._shared import is_preparing, prepare
from torchtune.datasets._store import TokenStore, Writers, shifted_labels
from torchtune.datasets._tokenize import TransformRows, tokenize_rows
from torchtune.modules.transforms.tokenizers._protocols import arrays_of
from torchtune.utils import get_logger, log_rank_zero


class SFTTransform(Transform):
    """A row to tokens and pre-shifted labels.

    Args:
        message_transform: row -> ``messages``; ``None`` where rows have them.
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
        """``tokens``, ``labels`` and what else the transforms give.

        Raises:
            DataError: the row does not fit the transforms.
        """
        return self._transformed(sample, lambda transform, messages: transform(messages))

    def as_arrays(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """``self(sample)``, with arrays for lists where the model transform gives these."""
        return self._transformed(sample, arrays_of)

    def _transformed(self, sample: Mapping[str, Any], tokenize: Callable[..., Any]) -> dict[str, Any]:
        sample = self.messages(sample)
        if self.model_transform is not None:
            sample = tokenize(self.model_transform, with_images(sample))
        sample = as_sample(sample, "the model transform")
        if "tokens" not in sample or "mask" not in sample:
            raise DataError(
                f"the model transform gives {', '.join(map(str, sample)) or 'nothing'}, but 'tokens' and 'mask' are "
                "needed"
            )
        sample["labels"] = shifted_labels(sample["tokens"], sample.pop("mask"))
        return sample

    def messages(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """What the model transform is given, with images as the rows have them. Raises :class:`DataError`."""
        if self.message_transform is None:
            return dict(sample)
        sample = as_sample(self.message_transform(sample), "message_transform")
        if "messages" in sample:
            sample["messages"] = as_messages(sample["messages"])
            validate_messages(sample["messages"])
        return sample

    def text(self, sample: Mapping[str, Any], decode: bool = False) -> dict[str, Any]:
        """``tokens``, ``labels`` and :func:`check_images` as ``note``, of a tokenizer that needs no pixels for that.

        The files of the images are looked at, or read if ``decode``. Raises :class:`DataError`.
        """
        sample = self.messages(sample)
        images = check_images(sample, decode)
        if "messages" not in sample:
            raise DataError(f"the message transform gives {', '.join(map(str, sample)) or 'nothing'}, not 'messages'")
        tokens, mask = self.model_transform.tokenize_messages(sample["messages"])
        return {"tokens": tokens, "labels": shifted_labels(tokens, mask), "note": images}


def transform_rows(found: RowSource, work: TransformRows, writers: Writers, rows: Any = None) -> dict[str, Any]:
    """Write the tokens of the rows of a source; ``skipped``: (row, reason) of those that are left out."""
    bad = BadRows(found.shown, rows=found.rows(), drop=found.skips, switch="on_bad_row=skip")
    rows = found.rows() if rows is None else rows
    return {**tokenize_rows(rows, work, bad, writers), "skipped": bad.left_out}


def row_numbers(info: Mapping[str, Any], rows: int, source: str) -> np.ndarray:
    """int64 [rows]: the number of each row in its source; says which are left out."""
    skipped = info.get("skipped", [])
    say_what_is_left_out(skipped, source, rows + len(skipped))
    return np.delete(np.arange(rows + len(skipped)), [row for row, _ in skipped])


def say_what_is_cut(info: Mapping[str, Any], rows: int, source: str, limit: int | None) -> None:
    """Warn of rows that may have been cut, whether they were prepared now or before."""
    if info.get("cut"):
        log_rank_zero(
            get_logger(),
            f"{info['cut']} of {rows} rows of {source} are as long as max_seq_len={limit} or were cut to it.",
            logging.WARNING,
        )


class SFTDataset(Dataset):
    """Rows for supervised fine-tuning, tokenized when the dataset is made.

    One process of a machine tokenizes, all of them map its files. They are used again by later runs with the same
    data, tokenizer and settings; transforms and filters that are not of this library take part where they have an
    attribute ``fingerprint``, a text that changes when they do.

    Everything that is wrong with the data shows before training starts. Transforms that give more than tokens
    (images) are applied whenever such a row is read. Before training the text of all rows is tokenized, if the
    ``model_transform`` can do that alone (it has ``takes_images``), and every image file is looked at.

    ``on_bad_row=skip`` leaves out rows that cannot be trained on, and lists them in the run's ``skipped_rows.jsonl``.
    It reads every image once before training.

    Args:
        source: a dataset of the hub, a folder, a file, a loader's name (``json``, ``csv``, ``parquet`` …), or rows in
            memory: a ``datasets.Dataset`` or an iterable of mappings.
        message_transform: row -> ``messages``.
        model_transform: ``messages`` -> ``tokens`` and ``mask``, usually a tokenizer.
        filter_fn: rows for which it is false are left out.
        filter_kwargs: arguments of ``datasets.Dataset.filter``.
        **load_dataset_kwargs: arguments of ``datasets.load_dataset``; ``prepared``: a folder of ``tune data prepare``.

    Attributes:
        on_reading: rows are transformed when they are read.
        num_images: images of all rows; ``None`` where rows are text.

    Raises:
        DataError: the data cannot be loaded, has no rows, or has rows that cannot be trained on (named by number); the
            rows in ``prepared`` are others.

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
        self.source = found.shown
        limit, side = (
            getattr(model_transform, "max_seq_len", None),
            getattr(model_transform, "truncation_type", "right"),
        )
        fingerprint = Fingerprint()
        fingerprint.add_part("dataset", type(self))
        fingerprint.add_part("masks and columns", message_transform)
        fingerprint.add_part("tokenizer", model_transform)
        found.add_to(fingerprint)
        takes_images = bool(getattr(model_transform, "takes_images", False))
        if takes_images and found.skips and not is_preparing():
            fingerprint.is_exact = False  # which images are broken is no part of it

        def build(writers: Writers) -> dict[str, Any]:
            if not takes_images:
                info = transform_rows(found, TransformRows(self._transform.as_arrays, limit, side), writers)
                return self._checked(found) if info.get("on_reading") else info
            text = partial(self._transform.text, decode=found.skips)
            rows = encoded(found.rows(), message_transform)
            info = transform_rows(found, TransformRows(text, limit, side, notes=True), writers, rows)
            return {**info, **summary(info["notes"])}

        stores, info = prepare(fingerprint, ["rows"], self.source, build, found.prepared)
        self.on_reading = takes_images or bool(info.get("on_reading"))
        self.num_images: int | None = info.get("images")
        self._image_names: int = info.get("image_names", 0)
        self._rows = encoded(found.rows(), message_transform) if self.on_reading else None
        self.store: TokenStore | None = None if info.get("on_reading") else stores["rows"]
        self._skips = found.skips
        kept = len(self._rows) - len(info["skipped"]) if self.store is None else len(self.store)
        self._numbers = row_numbers(info, kept, self.source)
        say_what_is_cut(info, len(self), self.source, limit)

    def _checked(self, found: RowSource) -> dict[str, Any]:
        """What there is to say of rows that somebody else's transform makes of text and images."""
        bad = BadRows(found.shown, rows=found.rows(), drop=found.skips, switch="on_bad_row=skip")
        rows = encoded(found.rows(), self._transform.message_transform)
        notes = check_rows(rows, lambda row: check_images(self._transform.messages(row), found.skips), bad)
        return {"on_reading": True, **summary(notes), "skipped": bad.left_out}

    @property
    def lengths(self) -> np.ndarray:
        """int64 [rows]: tokens of every row."""
        if self.store is None:
            return np.array([len(self[index]["tokens"]) for index in range(len(self))])
        return self.store.lengths

    @property
    def fingerprint(self) -> int | None:
        """Changes when any token, label or image's name does; ``None`` where tokens are known on reading only."""
        return None if self.store is None else self.store.fingerprint ^ self._image_names

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """``tokens`` and pre-shifted ``labels`` as lists, and what else the transform gives.

        Raises:
            DataError: an image cannot be read, which could not be seen before.
        """
        if not self.on_reading:
            tokens, labels = self.store.arrays(index)
            return {"tokens": tokens.tolist(), "labels": labels.tolist()}
        row = int(self._numbers[index])
        try:
            return self._transform(self._rows[row])
        except DataError as error:
            raise row_error(error, self.source, row, self._rows, self._skips) from error

    def images(self, index: int) -> list[Any]:
        """The images of a row as it has them: paths, addresses, files or pixels."""
        if not self.on_reading:
            return []
        return images_of(self._transform.messages(self._rows[int(self._numbers[index])]))

    def origins(self, index: int) -> list[dict[str, Any]]:
        """``source`` and ``row`` (counted from 0, after ``filter_fn``) of an example."""
        return [{"source": self.source, "row": int(self._numbers[index])}]

    def document(self, index: int, start: int = 0, end: int | None = None) -> dict[str, torch.Tensor]:
        """int64 tensors of (a piece of) a row."""
        return document_of(self, index, start, end)


def document_of(dataset: Any, index: int, start: int = 0, end: int | None = None) -> dict[str, torch.Tensor]:
    """int64 tensors of (a piece of) a row of any dataset whose rows have ``tokens`` and ``labels``."""
    store = getattr(dataset, "store", None)
    if store is not None:
        return store.document(index, start, end)
    row = dataset[index]
    return {key: torch.as_tensor(row[key], dtype=torch.int64)[start:end] for key in ("tokens", "labels")}
