"""Datasets of datasets: concatenations and weighted mixtures."""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from numbers import Real
from typing import Any, Literal

import numpy as np

from torchtune.data import DataError, ExampleDataset, SourceNumber, as_example_dataset, make_random_state
from torchtune.utils import get_logger, log_rank_zero

_NUM_CACHED = 4  # blocks of a stream's order
Stop = Literal["first", "all", "repeat"]


class ConcatDataset(ExampleDataset):
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
        self.parts = [as_example_dataset(dataset) for dataset in datasets]
        if not self.parts:
            raise DataError("The list of datasets is empty.")
        self.is_packed = _are_packed(self.parts)
        if any(dataset.is_stream for dataset in self.parts):
            raise DataError("A list of datasets cannot hold one with streaming=True: leave streaming out.")
        self._set_sizes()

    def _set_sizes(self) -> None:
        """Set the index behind the last example of each dataset."""
        self._ends = np.cumsum([len(dataset) for dataset in self.parts])

    def limit_rows(self, longest: int) -> None:
        """See :meth:`torchtune.data.ExampleDataset.limit_rows`."""
        num_examples = len(self)
        for dataset in self.parts:
            dataset.limit_rows(longest)
        if sum(len(dataset) for dataset in self.parts) != num_examples:
            self._set_sizes()

    @property
    def fingerprint(self) -> tuple[Any, ...]:
        """Fingerprints of the datasets."""
        return tuple(dataset.fingerprint for dataset in self.parts)

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each example, int64 ``[examples]``."""
        return np.concatenate([dataset.measure() for dataset in self.parts])

    @property
    def known_lengths(self) -> np.ndarray | None:
        """See :class:`torchtune.data.ExampleDataset`."""
        lengths = [dataset.known_lengths for dataset in self.parts]
        if any(lengths_of_part is None for lengths_of_part in lengths):
            return None
        return np.concatenate(lengths)

    @property
    def longest(self) -> int | None:
        """See :class:`torchtune.data.ExampleDataset`."""
        longest = [dataset.longest for dataset in self.parts]
        if None in longest:
            return None
        return max(longest)

    @property
    def num_images(self) -> int:
        """Number of images of all rows, as far as it is known."""
        return sum(dataset.num_images or 0 for dataset in self.parts)

    @property
    def may_have_images(self) -> bool:
        """See :class:`torchtune.data.ExampleDataset`."""
        return any(dataset.may_have_images for dataset in self.parts)

    @property
    def dropped(self) -> list[int]:
        """Numbers of the rows that are left out, in the source of each dataset."""
        dropped: list[int] = []
        for dataset in self.parts:
            dropped += dataset.dropped
        return dropped

    @property
    def num_truncated(self) -> int:
        """See :class:`torchtune.data.ExampleDataset`."""
        return sum(dataset.num_truncated for dataset in self.parts)

    def row_datasets(self) -> list[ExampleDataset]:
        """See :class:`torchtune.data.ExampleDataset`."""
        return _row_datasets(self.parts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        """Return an example."""
        number, row = self._locate(index)
        return self.parts[number][row]

    def origins(self, index: int) -> list[dict[str, Any]]:
        """Return ``source`` and ``row`` of each document of an example."""
        number, row = self._locate(index)
        return self.parts[number].origins(row)

    def _locate(self, index: int) -> tuple[int, int]:
        """Return (dataset, index in it)."""
        index = range(len(self))[index]
        number = int(np.searchsorted(self._ends, index, side="right"))
        start = 0
        if number > 0:
            start = int(self._ends[number - 1])
        return number, index - start


def _row_datasets(datasets: Sequence[ExampleDataset]) -> list[ExampleDataset]:
    """Return the datasets of rows inside of datasets, see :meth:`torchtune.data.ExampleDataset.row_datasets`."""
    row_datasets = []
    for dataset in datasets:
        row_datasets += dataset.row_datasets()
    return row_datasets


def _are_packed(datasets: Sequence[ExampleDataset]) -> bool:
    """Return whether datasets are packed; raise :class:`DataError` if some are and others are not."""
    packed = [dataset.is_packed for dataset in datasets]
    if any(packed) and not all(packed):
        raise DataError("Datasets with packed=True and packed=False cannot be mixed: set all of them alike.")
    return all(packed)


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
        self.names = tuple(map(str, datasets))
        self._given_weights = weights
        self._temperature = temperature
        self._stop = stop
        super().__init__(list(datasets.values()))

    def _set_sizes(self) -> None:
        """Set the weights and the number of examples in an epoch of each dataset, and log them."""
        super()._set_sizes()
        self.sizes = [len(dataset) for dataset in self.parts]
        self._weights = mixture_weights(self.names, self.sizes, self._given_weights, self._temperature)
        self._counts = mixture_counts(self.sizes, self._weights, self._stop)
        # `mixture` is in the checkpoint's data position: resuming with another one raises.
        weights = [f"{name} {weight:.6g}" for name, weight in zip(self.names, self._weights, strict=True)]
        self.mixture = f"{', '.join(weights)}, stop={self._stop}"
        unit = "examples"
        if self.is_packed:
            unit = "packs"
        lines = [f"An epoch of the mixture has {self.examples_per_epoch:,} {unit} (stop={self._stop}):"]
        for name, size, weight, count in zip(self.names, self.sizes, self._weights, self._counts, strict=True):
            line = f"  {name}: {count:,} of {size:,}, {weight:.1%}"
            if count > size:
                line += f", each {count / size:.1f} times"
            lines.append(line)
        log_rank_zero(get_logger(), "\n".join(lines))

    @property
    def examples_per_epoch(self) -> int:
        """Number of examples in an epoch, which may skip or repeat some."""
        return sum(self._counts)

    def order(self, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
        """Return the indices of an epoch, int64 ``[examples_per_epoch]``.

        Examples are sorted by ``(k + u) / w`` for example ``k`` of a dataset of weight ``w``; ``u`` is random in [0, 1)
        if ``shuffle``, otherwise 1 / 2. Therefore every section of the order contains the datasets in proportion.
        """
        times = []  # (k + u) / w of each example
        indices = []
        start = 0  # index of the first example of a dataset
        for number, (size, weight, count) in enumerate(zip(self.sizes, self._weights, self._counts, strict=True)):
            # A generator for each dataset: another dataset, or another weight of it, does not change this one's order.
            random = make_random_state(seed, epoch, number)
            offsets = np.full(count, 0.5)
            if shuffle:
                offsets = random.random_sample(count)
            times.append((np.arange(count) + offsets) / weight)
            passes = []
            for _ in range(math.ceil(count / size)):
                order = np.arange(size)
                if shuffle:
                    order = random.permutation(size)
                passes.append(order)
            indices.append(start + np.concatenate(passes)[:count])
            start += size
        by_time = np.argsort(np.concatenate(times), kind="stable")
        return np.concatenate(indices)[by_time]

    def __getitem__(self, index: int) -> Any:
        """Return an example, with ``source`` in each of its documents."""
        number, row = self._locate(index)
        return with_source(self.parts[number][row], number, self.names)


class MixedStream(ExampleDataset):
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
        self.names = tuple(map(str, datasets))
        self._datasets = [as_example_dataset(dataset) for dataset in datasets.values()]
        self.is_packed = _are_packed(self._datasets)
        sizes = [1] * len(self._datasets)  # only for weights by size, which a stream cannot have
        shares = mixture_weights(self.names, sizes, weights, temperature)
        self.mixture = ", ".join(f"{name} {share:.6g}" for name, share in zip(self.names, shares, strict=True))
        # Integers, so that the number of examples before an index is exact.
        self._shares = [0]
        for share in shares:
            self._shares.append(self._shares[-1] + max(1, round(share * 2**30)))
        # Examples are shuffled within a block, so that it is not short. Even the smallest dataset has two of a block.
        self._length = max(256, math.ceil(2 / min(shares)))
        self._set_order(0, shuffle=False)

    @property
    def fingerprint(self) -> list[Any]:
        """Fingerprints of the datasets."""
        return [dataset.fingerprint for dataset in self._datasets]

    def row_datasets(self) -> list[ExampleDataset]:
        """See :class:`torchtune.data.ExampleDataset`."""
        return _row_datasets(self._datasets)

    def limit_rows(self, longest: int) -> None:
        """See :meth:`torchtune.data.ExampleDataset.limit_rows`."""
        for dataset in self._datasets:
            dataset.limit_rows(longest)

    def begin(self, seed: int, *, shuffle: bool) -> None:
        """Move to the first example; the order depends on ``seed`` if ``shuffle``."""
        self._set_order(seed, shuffle=shuffle)
        for number, dataset in enumerate(self._datasets):
            dataset.begin(seed + number, shuffle=shuffle)

    def _set_order(self, seed: int, *, shuffle: bool) -> None:
        """Forget the blocks and permutations of another order, and compute those of this one when they are read."""
        self._seed = seed
        self._shuffle = shuffle
        self._block = lru_cache(_NUM_CACHED)(self._make_block)
        self._permutation = lru_cache(len(self._datasets))(self._make_permutation)

    def state_at(self, index: int) -> dict[str, Any]:
        """Return the state of the streams with ``index`` as next example, as plain data."""
        block, position = divmod(index, self._length)
        # The next example of a dataset: those before the block, and those in it before the index.
        before_block = self._before(block * self._length)
        sources, _ = self._block(block)
        in_block = np.bincount(sources[:position], minlength=len(self.names)).tolist()
        state = {}
        for number, (name, dataset) in enumerate(zip(self.names, self._datasets, strict=True)):
            if dataset.is_stream:
                state[name] = dataset.state_at(before_block[number] + in_block[number])
        return state

    def go_to(self, state: Mapping[str, Any]) -> None:
        """Restore a state that :meth:`state_at` returned."""
        for name, dataset in zip(self.names, self._datasets, strict=True):
            if name in state:
                dataset.go_to(state[name])

    def __getitem__(self, index: int) -> Any:
        """Return an example, with ``source`` in each of its documents."""
        number, row = self._locate(index)
        return with_source(self._datasets[number][row], number, self.names)

    def read_ahead(self, indices: Sequence[int]) -> None:
        """See :meth:`StreamedDataset.read_ahead`."""
        rows_of: dict[int, list[int]] = {}  # number of a dataset -> indices in it
        for index in indices:
            number, row = self._locate(index)
            rows_of.setdefault(number, []).append(row)
        for number, rows in rows_of.items():
            self._datasets[number].read_ahead(rows)

    def origins(self, index: int) -> list[dict[str, Any]]:
        """Return ``source`` and ``line`` or ``row`` of each document of an example."""
        number, row = self._locate(index)
        return self._datasets[number].origins(row)

    def _before(self, index: int) -> list[int]:
        """Return the number of examples of each dataset before an index, a multiple of the block length."""
        ends = [share * index // self._shares[-1] for share in self._shares]
        return [end - start for start, end in pairwise(ends)]

    def _make_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return, for each example of a block, the dataset and the example's number in it, int64 ``[block length]``."""
        starts = self._before(block * self._length)
        ends = self._before((block + 1) * self._length)
        random = make_random_state(self._seed, block, len(self.names))
        times = []  # of each example within the block, from 0 to 1
        numbers = []
        for start, end in zip(starts, ends, strict=True):
            count = end - start
            offsets = np.full(count, 0.5)
            if self._shuffle:
                offsets = random.random_sample(count)
            times.append((np.arange(count) + offsets) / count)
            numbers.append(np.arange(start, end))
        order = np.argsort(np.concatenate(times), kind="stable")
        sources = np.repeat(np.arange(len(numbers)), [len(part) for part in numbers])
        return sources[order], np.concatenate(numbers)[order]

    def _make_permutation(self, source: int, passes: int) -> np.ndarray:
        """Return the order of the rows of a dataset that is no stream in its pass number ``passes``."""
        return make_random_state(self._seed, passes, source).permutation(len(self._datasets[source]))

    def _locate(self, index: int) -> tuple[int, int]:
        """Return (dataset, index in it)."""
        block, position = divmod(index, self._length)
        sources, numbers = self._block(block)
        source = int(sources[position])
        number = int(numbers[position])
        dataset = self._datasets[source]
        if dataset.is_stream:  # a stream shuffles its rows itself
            return source, number
        passes, row = divmod(number, len(dataset))
        if self._shuffle:
            row = int(self._permutation(source, passes)[row])
        return source, row


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
    """Return weights with the sum 1, one for each of ``names``; ``weights`` None weights datasets by their sizes.

    Raises:
        DataError: names and weights do not match, or a number is out of range.
    """
    if weights is None:
        numbers = list(sizes)
    elif not isinstance(weights, Mapping):
        raise DataError(f"weights is a {type(weights).__name__}: give a number for the name of each dataset.")
    else:
        weight_of_name = {str(name): weight for name, weight in weights.items()}  # YAML reads 2024 as a number
        unmatched = weight_of_name.keys() ^ set(names)  # on one side only
        if unmatched:
            name = min(unmatched)
            problem = "is no dataset of the mixture"
            if name in names:
                problem = "has no weight"
            raise DataError(f"weights: '{name}' {problem}: name each of {', '.join(names)} once.")
        numbers = [weight_of_name[name] for name in names]
    for name, weight in zip(names, numbers, strict=True):
        is_number = isinstance(weight, Real) and math.isfinite(weight)
        if not is_number or weight <= 0:
            raise DataError(f"weights: {name} has {weight}: a weight is above 0; leave out a dataset that is not used.")
    if not temperature > 0:
        raise DataError(f"temperature must be above 0, not {temperature}: 1 leaves weights as they are.")
    largest = max(numbers)  # divided by it, so that the power of large weights does not overflow
    scaled = [(weight / largest) ** (1 / temperature) for weight in numbers]
    return [weight / math.fsum(scaled) for weight in scaled]


def mixture_counts(sizes: Sequence[int], weights: Sequence[float], stop: Stop) -> list[int]:
    """Return the number of examples of each dataset in an epoch."""
    if stop not in ("first", "all", "repeat"):
        raise DataError(f"stop must be first, all or repeat, not '{stop}'.")
    if stop == "all":
        return list(sizes)
    # Examples per weight until a dataset is exhausted.
    ends = [size / weight for size, weight in zip(sizes, weights, strict=True)]
    counts = []
    for size, weight in zip(sizes, weights, strict=True):
        # The product may lie a little above a whole number, which must not become the next one. Rounding must not add
        # an example that a dataset lacks, or leave one out.
        if stop == "first":  # no dataset restarts
            counts.append(min(math.ceil(weight * min(ends) - 1e-6), size))
        else:  # no example is left out
            counts.append(max(math.ceil(weight * max(ends) - 1e-6), size))
    return counts
