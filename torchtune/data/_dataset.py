"""The interface of datasets: a base class with defaults, and a wrapper that gives it to any object with examples."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from torch.utils.data import Dataset
from tqdm import tqdm

from torchtune.data._messages import Message
from torchtune.data._prompt_templates import PairTemplate
from torchtune.data._to_messages import Conversation


def make_random_state(seed: int, *words: int) -> np.random.RandomState:
    """Return a generator that depends only on ``seed`` and ``words``."""
    # RandomState has a frozen stream by numpy's compatibility policy; Generator does not.
    return np.random.RandomState([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF, *words])


class ExampleDataset(Dataset):
    """Base class of datasets, with a default for everything that loaders, packs, mixtures and reports ask.

    An example is a mapping with ``tokens`` and ``labels``, a pair of answers, or a pack: a list of such mappings. A
    subclass defines ``__getitem__`` and, unless it is a stream, ``__len__``; it overrides what it knows better.

    Attributes:
        is_packed: whether examples are packs.
        is_stream: whether examples are read during training. A stream has no length: its indices count the examples of
            the whole run, and :meth:`begin`, :meth:`go_to` and :meth:`state_at` set and save its position.
        on_reading: whether rows are transformed each time they are read, because they have more than tokens, such as
            images.
        fingerprint: value that changes with the content of the examples; None if it is unknown.
        mixture: description of the names and weights of a mixture, which must not change in a resumed run; None for
            other datasets.
        examples_per_epoch: number of examples in an epoch of a mixture, which may skip or repeat some; None: all once.
        num_images: number of images in all rows; None if the rows are text.
        image_tokens: number of image tokens in each row, int64 ``[rows]``; None if the model has no image tokens.
        dropped: numbers of the rows of the source that are left out, because they cannot be trained on.
        num_truncated: number of rows that were cut to the tokenizer's ``max_seq_len``, or are as long.
        omitted: text about the values of rows that the chat template omits; empty if it writes all.
        instructions: texts before the queries (``query``) and the passages (``document``) of rows for embedding models.
        add_eos: whether texts of rows for embedding models end with the EOS token; None: as the tokenizer's files say.
        pair_template: template of rows for rerankers; None for other rows.
    """

    is_packed: bool = False
    is_stream: bool = False
    on_reading: bool = False
    fingerprint: Any = None
    mixture: str | None = None
    examples_per_epoch: int | None = None
    num_images: int | None = None
    image_tokens: np.ndarray | None = None
    dropped: Sequence[int] = ()
    num_truncated: int = 0
    omitted: str = ""
    instructions: Mapping[str, str] = MappingProxyType({})
    add_eos: bool | None = None
    pair_template: PairTemplate | None = None

    @property
    def known_lengths(self) -> np.ndarray | None:
        """Number of tokens of each example, int64 ``[examples]``; None if examples would have to be read."""
        return None

    def measure(self) -> np.ndarray:
        """Return the number of tokens of each example, int64 ``[examples]``; read all examples if it is not known."""
        lengths = self.known_lengths
        if lengths is not None:
            return lengths
        indices = tqdm(range(len(self)), desc="Measuring", disable=None)
        return np.array([len(self[index]["tokens"]) for index in indices])

    @property
    def num_known_tokens(self) -> int | None:
        """Number of tokens of all examples; None if examples would have to be read."""
        lengths = self.known_lengths
        if lengths is None:
            return None
        return int(lengths.sum())

    @property
    def longest(self) -> int | None:
        """Number of tokens of the longest sequence that the model reads; None if it is unknown."""
        lengths = self.known_lengths
        if lengths is None or not len(lengths):
            return None
        return int(lengths.max())

    @property
    def may_have_images(self) -> bool:
        """Whether rows have images, or may have some."""
        return bool(self.num_images)

    def order(self, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
        """Return the indices of an epoch in their order, int64 ``[examples per epoch]``."""
        if not shuffle:
            return np.arange(len(self))
        return make_random_state(seed, epoch).permutation(len(self))

    def origins(self, index: int) -> list[dict[str, Any]]:
        """Return ``row`` or ``line`` and, if it is known, ``source`` of each document of an example."""
        return [{"row": index}]

    def images(self, index: int) -> list[Any]:
        """Return the images of a row as they are stored: paths, URLs, bytes or images."""
        return []

    def token_row(self, index: int) -> Any:
        """Return an example without its images, if that is faster to read; stored tokens are views, not lists."""
        return self[index]

    def row_datasets(self) -> list["ExampleDataset"]:
        """Return the datasets of rows inside of packs and mixtures; this one, if its examples are rows."""
        return [self]

    def conversations(self) -> Iterator[list[Message]] | None:
        """Return an iterator over the messages of each row of the source; None if rows are not conversations."""
        return None

    def first_conversations(self, count: int) -> list[tuple[int, Mapping[str, Any], Conversation]] | None:
        """Return the conversations of the first rows with a right answer; None if rows are not conversations.

        Args:
            count: maximum number of rows.

        Returns:
            For each row its number in the source (from 0), its columns, and its conversation, which ends with the right
            answer. Rows without a right answer, such as those with a bad one, are left out.
        """
        return None

    def limit_rows(self, longest: int) -> None:
        """Refuse rows of more tokens than the model reads, or leave them out if rows that cannot be trained on are.

        A dataset does not know the model. Call this before :meth:`begin` and before the first example is read.

        Args:
            longest: maximum number of tokens of a row.

        Raises:
            DataError: rows are longer, and they are not left out.
        """

    def begin(self, seed: int, *, shuffle: bool) -> None:
        """Move a stream to its first example; the order depends on ``seed`` if ``shuffle``."""

    def state_at(self, index: int) -> dict[str, Any]:
        """Return the state of a stream with ``index`` as next example, as plain data."""
        return {}

    def go_to(self, state: Mapping[str, Any]) -> None:
        """Restore a state that :meth:`state_at` returned."""

    def read_ahead(self, indices: Sequence[int]) -> None:
        """Announce the next examples to a stream, which may read them in another process."""


class WrappedDataset(ExampleDataset):
    """Dataset around an object with examples by index: a user's own dataset, a list, or a dataset to add entries to.

    Of the facts and methods of :class:`ExampleDataset`, those that the object has are used. Its other attributes can be
    read here, too.

    Args:
        dataset: the object.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)

    @property
    def is_packed(self) -> bool:
        """See :class:`ExampleDataset`."""
        # Packed datasets of earlier releases have an attribute `packs`.
        return getattr(self.dataset, "is_packed", hasattr(self.dataset, "packs"))

    @property
    def is_stream(self) -> bool:
        """See :class:`ExampleDataset`."""
        return getattr(self.dataset, "is_stream", False)

    @property
    def on_reading(self) -> bool:
        """See :class:`ExampleDataset`."""
        return getattr(self.dataset, "on_reading", False)

    @property
    def fingerprint(self) -> Any:
        """See :class:`ExampleDataset`."""
        return getattr(self.dataset, "fingerprint", None)

    @property
    def mixture(self) -> str | None:
        """See :class:`ExampleDataset`."""
        return getattr(self.dataset, "mixture", None)

    @property
    def num_images(self) -> int | None:
        """See :class:`ExampleDataset`."""
        return getattr(self.dataset, "num_images", None)

    @property
    def image_tokens(self) -> np.ndarray | None:
        """See :class:`ExampleDataset`."""
        return getattr(self.dataset, "image_tokens", None)

    @property
    def known_lengths(self) -> np.ndarray | None:
        """See :class:`ExampleDataset`."""
        if isinstance(self.dataset, ExampleDataset):
            return self.dataset.known_lengths  # its `lengths` may read all rows
        lengths = getattr(self.dataset, "lengths", None)
        if lengths is None:
            return None
        return np.asarray(lengths)

    def row_datasets(self) -> list[ExampleDataset]:
        """See :class:`ExampleDataset`."""
        if isinstance(self.dataset, ExampleDataset):
            return self.dataset.row_datasets()
        return [self]

    @property
    def may_have_images(self) -> bool:
        """Whether rows have images; True for a dataset that does not tell."""
        if isinstance(self.dataset, ExampleDataset):
            return self.dataset.may_have_images
        return bool(getattr(self.dataset, "num_images", True))

    @property
    def examples_per_epoch(self) -> int | None:
        """See :class:`ExampleDataset`."""
        return getattr(self.dataset, "examples_per_epoch", None)

    def order(self, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
        """See :class:`ExampleDataset`."""
        if hasattr(self.dataset, "order"):
            return self.dataset.order(seed, epoch, shuffle)
        return super().order(seed, epoch, shuffle)

    def origins(self, index: int) -> list[dict[str, Any]]:
        """See :class:`ExampleDataset`."""
        if hasattr(self.dataset, "origins"):
            return self.dataset.origins(index)
        return super().origins(index)

    def images(self, index: int) -> list[Any]:
        """See :class:`ExampleDataset`."""
        if not self.on_reading:
            return []
        return self.dataset.images(index)

    def begin(self, seed: int, *, shuffle: bool) -> None:
        """See :class:`ExampleDataset`."""
        if hasattr(self.dataset, "begin"):
            self.dataset.begin(seed, shuffle=shuffle)

    def state_at(self, index: int) -> dict[str, Any]:
        """See :class:`ExampleDataset`."""
        if hasattr(self.dataset, "state_at"):
            return self.dataset.state_at(index)
        return {}

    def go_to(self, state: Mapping[str, Any]) -> None:
        """See :class:`ExampleDataset`."""
        if hasattr(self.dataset, "go_to"):
            self.dataset.go_to(state)

    def read_ahead(self, indices: Sequence[int]) -> None:
        """See :class:`ExampleDataset`."""
        if hasattr(self.dataset, "read_ahead"):
            self.dataset.read_ahead(indices)


def as_example_dataset(dataset: Any) -> ExampleDataset:
    """Return a dataset with the interface of :class:`ExampleDataset`; any other object is wrapped."""
    if isinstance(dataset, ExampleDataset):
        return dataset
    return WrappedDataset(dataset)
