"""Datasets of datasets: concatenations and weighted mixtures."""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from torch.utils.data import Dataset

from torchtune.data import DataError, SourceNumber, make_random_state
from torchtune.datasets._packed import PackedDataset, origins_of
from torchtune.utils import get_logger, log_rank_zero

_KEPT = 4  # cached blocks of a stream's order
Stop = Literal["first", "all", "repeat"]


class ConcatDataset(Dataset):
    """Concatenation of datasets.

    Args:
        datasets: either all packed or none.

    Raises:
        DataError: the list is empty, packed and unpacked datasets are mixed, or a dataset is streamed.

    Example:
        >>> short = [{"tokens": [1], "labels": [1]}]
        >>> len(torchtune.datasets.ConcatDataset([short, short]))
        2
    """

    def __init__(self, datasets: Sequence[Any]) -> None:
        self._datasets = list(datasets)
        if not self._datasets:
            raise DataError("The list of datasets is empty.")
        packed = [isinstance(dataset, PackedDataset) for dataset in self._datasets]
        if any(packed) and not all(packed):
            raise DataError("Datasets with packed=True and packed=False cannot be mixed: set all of them alike.")
        if not all(hasattr(dataset, "__len__") for dataset in self._datasets):
            raise DataError("A list of datasets cannot hold one with streaming=True: leave streaming out.")
        self._ends = np.cumsum([len(dataset) for dataset in self._datasets])

    @property
    def parts(self) -> list[Any]:
        """The concatenated datasets."""
        return self._datasets

    @property
    def fingerprint(self) -> tuple[Any, ...]:
        """Fingerprints of the datasets."""
        return tuple(getattr(dataset, "fingerprint", None) for dataset in self._datasets)

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each example, int64 ``[examples]``."""
        return np.concatenate([np.asarray(dataset.lengths) for dataset in self._datasets])

    @property
    def num_images(self) -> int:
        """Number of images of all rows; raises ``AttributeError`` if a dataset has no such attribute."""
        return sum(dataset.num_images or 0 for dataset in self._datasets)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        """Return an example."""
        number, row = self._locate(index)
        return self._datasets[number][row]

    def origins(self, index: int) -> list[dict[str, Any]]:
        """Return ``source`` and ``row`` of each document of an example."""
        number, row = self._locate(index)
        return origins_of(self._datasets[number], row)

    def _locate(self, index: int) -> tuple[int, int]:
        """Return (dataset, index in it)."""
        index = range(len(self))[index]
        number = int(np.searchsorted(self._ends, index, side="right"))
        return number, index - int(self._ends[number - 1]) if number else index


class MixedDataset(ConcatDataset):
    """Weighted mixture of datasets; every part of an epoch contains them in proportion.

    Indices count the examples of the concatenated datasets. :meth:`order` returns the indices of an epoch for
    :class:`torchtune.data.BatchLoader`. Each example has a ``source``, so that losses are logged per dataset.

    Args:
        datasets: name -> dataset; either all packed or none.
        weights: name -> weight, in examples (packs); by default the number of examples.
        temperature: weights become ``weight ** (1 / temperature)``; values above 1 make them more equal (section 3.1 of
            https://arxiv.org/abs/1907.05019).
        stop: end of an epoch. ``repeat``: every example was visited, and exhausted datasets restart. ``all``: every
            example was visited exactly once, and exhausted datasets drop out. ``first``: the first dataset is
            exhausted.

    Raises:
        DataError: names and weights do not match, a number is out of range, or packed and unpacked datasets are mixed.

    Example:
        >>> rows = [{"tokens": [n], "labels": [n]} for n in range(12)]
        >>> mixture = torchtune.datasets.MixedDataset({"small": rows[:3], "large": rows[3:]}, {"small": 1, "large": 1})
        >>> mixture.examples_per_epoch  # 9 of large, and 9 of small: each three times
        18
    """

    def __init__(
        self,
        datasets: Mapping[str, Any],
        weights: Mapping[str, float] | None = None,
        temperature: float = 1.0,
        stop: Stop = "repeat",
    ) -> None:
        super().__init__(list(datasets.values()))
        self.names = tuple(map(str, datasets))
        self.sizes = [len(dataset) for dataset in self._datasets]
        self._weights = mixture_weights(self.names, self.sizes, weights, temperature)
        self._counts = mixture_counts(self.sizes, self._weights, stop)
        self.examples_per_epoch = sum(self._counts)
        shown = list(zip(self.names, self.sizes, self._weights, self._counts, strict=True))
        self.mixture = ", ".join(f"{name} {weight:.6g}" for name, _, weight, _ in shown) + f", stop={stop}"
        lines = (
            f"  {name}: {count:,} of {size:,}, {weight:.1%}"
            + (f", each {count / size:.1f} times" if count > size else "")
            for name, size, weight, count in shown
        )
        kind = "packs" if hasattr(self._datasets[0], "packs") else "examples"
        head = f"An epoch of the mixture has {self.examples_per_epoch:,} {kind} (stop={stop}):"
        log_rank_zero(get_logger(), "\n".join([head, *lines]))

    def order(self, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
        """Return the indices of an epoch, int64 ``[examples_per_epoch]``.

        Examples are sorted by ``(k + u) / w`` for example ``k`` of a dataset of weight ``w``; ``u`` is random in [0, 1)
        if ``shuffle``, otherwise 1 / 2. Therefore every section of the order contains the datasets in proportion.
        """
        turns, found = [], []
        start = 0
        for number, (size, weight, count) in enumerate(zip(self.sizes, self._weights, self._counts, strict=True)):
            random = make_random_state(seed, epoch, number)
            within = random.random_sample(count) if shuffle else np.full(count, 0.5)
            turns.append((np.arange(count) + within) / weight)
            passes = [random.permutation(size) if shuffle else np.arange(size) for _ in range(math.ceil(count / size))]
            found.append(start + np.concatenate(passes)[:count])
            start += size
        return np.concatenate(found)[np.argsort(np.concatenate(turns), kind="stable")]

    def __getitem__(self, index: int) -> Any:
        """Return an example, with ``source`` in each of its documents."""
        number, row = self._locate(index)
        return with_source(self._datasets[number][row], number, self.names)


class MixedStream(Dataset):
    """Endless weighted mixture of datasets with at least one stream.

    Indices count the examples of the whole run. Each block of indices has the datasets in proportion and is shuffled
    separately. Exhausted datasets restart in a new order.

    Args:
        datasets: name -> dataset; either all packed or none.
        weights: name -> weight, in examples (packs).
        temperature: see :class:`MixedDataset`.

    Raises:
        DataError: see :class:`MixedDataset`; ``weights`` is None.
    """

    is_stream = True

    def __init__(
        self, datasets: Mapping[str, Any], weights: Mapping[str, float] | None, temperature: float = 1.0
    ) -> None:
        if weights is None:
            raise DataError("weights: a stream has no number of examples: give each dataset of the mixture a weight.")
        self.names, self._datasets = tuple(map(str, datasets)), list(datasets.values())
        if len({getattr(dataset, "is_packed", hasattr(dataset, "packs")) for dataset in self._datasets}) > 1:
            raise DataError("Datasets with packed=True and packed=False cannot be mixed: set all of them alike.")
        shares = mixture_weights(self.names, [1] * len(self._datasets), weights, temperature)
        # Integers, so that the number of examples before an index is exact.
        self._shares = np.cumsum([0, *(max(1, round(share * 2**30)) for share in shares)]).tolist()
        self._length = max(256, math.ceil(2 / min(shares)))
        self.mixture = ", ".join(f"{name} {share:.6g}" for name, share in zip(self.names, shares, strict=True))
        self.fingerprint = [getattr(dataset, "fingerprint", None) for dataset in self._datasets]
        self.begin(0, shuffle=False)

    def begin(self, seed: int, *, shuffle: bool) -> None:
        """Move to the first example; the order depends on ``seed`` if ``shuffle``."""
        self._seed, self._shuffle = seed, shuffle
        self._block = lru_cache(_KEPT)(self._make_block)
        self._permutation = lru_cache(len(self._datasets))(self._make_permutation)
        for number, dataset in enumerate(self._datasets):
            if hasattr(dataset, "begin"):
                dataset.begin(seed + number, shuffle=shuffle)

    def state_at(self, index: int) -> dict[str, Any]:
        """Return the state of the streams with ``index`` as next example, as plain data."""
        sources, _ = self._block(index // self._length)
        before = self._before(index // self._length * self._length)
        counts = np.bincount(sources[: index % self._length], minlength=len(self.names)).tolist()
        return {
            name: dataset.state_at(first + more)
            for name, dataset, first, more in zip(self.names, self._datasets, before, counts, strict=True)
            if hasattr(dataset, "state_at")
        }

    def go_to(self, state: Mapping[str, Any]) -> None:
        """Restore a state that :meth:`state_at` returned."""
        for name, dataset in zip(self.names, self._datasets, strict=True):
            if name in state:
                dataset.go_to(state[name])

    def __getitem__(self, index: int) -> Any:
        """Return an example, with ``source`` in each of its documents."""
        number, row = self._place(index)
        return with_source(self._datasets[number][row], number, self.names)

    def read_ahead(self, indices: Sequence[int]) -> None:
        """See :meth:`StreamedDataset.read_ahead`."""
        rows: dict[int, list[int]] = {}
        for number, row in map(self._place, indices):
            rows.setdefault(number, []).append(row)
        for number, found in rows.items():
            if hasattr(self._datasets[number], "read_ahead"):
                self._datasets[number].read_ahead(found)

    def origins(self, index: int) -> list[dict[str, Any]]:
        """Return ``source`` and ``line`` or ``row`` of each document of an example."""
        number, row = self._place(index)
        return origins_of(self._datasets[number], row)

    def _before(self, index: int) -> list[int]:
        """Return the number of examples of each dataset before an index, a multiple of the block length."""
        ends = [share * index // self._shares[-1] for share in self._shares]
        return [end - start for start, end in pairwise(ends)]

    def _make_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return, for each example of a block, the dataset and the example's number in it."""
        before, after = self._before(block * self._length), self._before((block + 1) * self._length)
        counts = [end - start for start, end in zip(before, after, strict=True)]
        random = make_random_state(self._seed, block, len(self.names))
        within = [random.random_sample(count) if self._shuffle else np.full(count, 0.5) for count in counts]
        turns = [(np.arange(len(one)) + one) / len(one) for one in within]
        order = np.argsort(np.concatenate(turns), kind="stable")
        sources = np.repeat(np.arange(len(counts)), counts)[order]
        numbers = np.concatenate([np.arange(*ends) for ends in zip(before, after, strict=True)])[order]
        return sources, numbers

    def _make_permutation(self, source: int, passes: int) -> np.ndarray:
        return make_random_state(self._seed, passes, source).permutation(len(self._datasets[source]))

    def _place(self, index: int) -> tuple[int, int]:
        """Return (dataset, index in it)."""
        source, number = (int(values[index % self._length]) for values in self._block(index // self._length))
        if hasattr(self._datasets[source], "begin"):
            return source, number
        passes, row = divmod(number, len(self._datasets[source]))
        return source, int(self._permutation(source, passes)[row]) if self._shuffle else row


def with_source(example: Any, number: int, names: tuple[str, ...]) -> Any:
    """Return an example or pack with ``source`` in each of its documents."""
    source = SourceNumber(number)
    source.names = names
    if isinstance(example, Mapping):
        return {**example, "source": source}
    return [{**document, "source": source} for document in example]


def mixture_weights(
    names: Sequence[str], sizes: Sequence[int], weights: Mapping[str, float] | None, temperature: float
) -> list[float]:
    """Return normalized weights; raise :class:`DataError` as :class:`MixedDataset` does."""
    if weights is not None and (odd := set(map(str, weights)).symmetric_difference(names)):
        what = "is no dataset of the mixture" if min(odd) not in names else "has no weight"
        raise DataError(f"weights: '{min(odd)}' {what}: name each of {', '.join(names)} once.")
    given = list(sizes) if weights is None else [weights[name] for name in names]
    for name, weight in zip(names, given, strict=True):
        if not (weight > 0 and math.isfinite(weight)):
            raise DataError(f"weights: {name} has {weight}: a weight is above 0; leave out a dataset that is not used.")
    if not temperature > 0:
        raise DataError(f"temperature must be above 0, not {temperature}: 1 leaves weights as they are.")
    largest = max(given)
    scaled = [(weight / largest) ** (1 / temperature) for weight in given]
    return [weight / math.fsum(scaled) for weight in scaled]


def mixture_counts(sizes: Sequence[int], weights: Sequence[float], stop: Stop) -> list[int]:
    """Return the number of examples of each dataset in an epoch."""
    times = [size / weight for size, weight in zip(sizes, weights, strict=True)]
    if stop not in ("first", "all", "repeat"):
        raise DataError(f"stop must be first, all or repeat, not '{stop}'.")
    if stop == "all":
        return list(sizes)
    end = min(times) if stop == "first" else max(times)
    counts = [math.ceil(weight * end - 1e-6) for weight in weights]
    limit = min if stop == "first" else max
    return [limit(count, size) for count, size in zip(counts, sizes, strict=True)]
