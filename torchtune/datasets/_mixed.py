"""Several datasets mixed by weight."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal

import numpy as np
from torch.utils.data import Dataset

from torchtune.config import Component, RuntimeArgs
from torchtune.data import DataError
from torchtune.data._common import SourceNumber
from torchtune.data._loader import random_of
from torchtune.datasets._concat import ConcatDataset
from torchtune.datasets._instantiate import instantiate_dataset
from torchtune.utils import get_logger, log_rank_zero

_KEPT = 4  # blocks of a stream's order
Stop = Literal["first", "all", "repeat"]


class MixedDataset(ConcatDataset):
    """Datasets mixed by weight: the order of an epoch draws from all of them, in proportion everywhere.

    Indices are those of the datasets one after another. :meth:`order` says which of them an epoch visits;
    :class:`torchtune.data.BatchLoader` reads it. An example carries its ``source``, so that losses are logged by name.

    Args:
        datasets: name -> dataset; all packed, or none.
        weights: name -> weight, in examples (packs). By default the number of examples.
        temperature: weights become ``weight ** (1 / temperature)``: above 1 they are more alike (section 3.1 of
            https://arxiv.org/abs/1907.05019).
        stop: when an epoch ends. ``repeat``: every example was visited; datasets that run out start again. ``all``:
            every example was visited exactly once; datasets that run out drop out. ``first``: a dataset runs out.

    Raises:
        DataError: names and weights do not fit, a number is out of its range, or packed and other datasets are mixed.

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
        """int64 [``examples_per_epoch``]: the indices that an epoch visits.

        Example ``k`` of a dataset of weight ``w`` has its turn at the time ``(k + u) / w``; ``u`` is random in [0, 1)
        if ``shuffle``, else 1 / 2. Every stretch of the order thereby has the datasets in proportion.
        """
        turns, found = [], []
        start = 0
        for number, (size, weight, count) in enumerate(zip(self.sizes, self._weights, self._counts, strict=True)):
            random = random_of(seed, epoch, number)
            within = random.random_sample(count) if shuffle else np.full(count, 0.5)
            turns.append((np.arange(count) + within) / weight)
            passes = [random.permutation(size) if shuffle else np.arange(size) for _ in range(math.ceil(count / size))]
            found.append(start + np.concatenate(passes)[:count])
            start += size
        return np.concatenate(found)[np.argsort(np.concatenate(turns), kind="stable")]

    def __getitem__(self, index: int) -> Any:
        """The example, with ``source`` in each of its documents."""
        number = int(np.searchsorted(self._ends, index % len(self), side="right"))
        return with_source(super().__getitem__(index), number, self.names)


class MixedStream(Dataset):
    """Datasets of which some are streams, mixed by weight without an end.

    Indices are those of the whole run. A block of them has each dataset in proportion, in an order of its own. Datasets
    that run out start again, in a new order.

    Args:
        datasets: name -> dataset; all packed, or none.
        weights: name -> weight, in examples (packs).
        temperature: see :class:`MixedDataset`.

    Raises:
        DataError: see :class:`MixedDataset`; there are no weights.
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
        # Whole numbers, so that the examples before any index are known exactly.
        self._shares = np.cumsum([0, *(max(1, round(share * 2**30)) for share in shares)]).tolist()
        self._length = max(256, math.ceil(2 / min(shares)))
        self.mixture = ", ".join(f"{name} {share:.6g}" for name, share in zip(self.names, shares, strict=True))
        self.fingerprint = [getattr(dataset, "fingerprint", None) for dataset in self._datasets]
        self.begin(0, shuffle=False)

    def begin(self, seed: int, *, shuffle: bool) -> None:
        """Go to the first example; the order depends on ``seed`` if ``shuffle``."""
        self._seed, self._shuffle = seed, shuffle
        self._passes: dict[int, tuple[int, np.ndarray]] = {}
        self._blocks: dict[int, tuple[int, np.ndarray, np.ndarray]] = {}
        for number, dataset in enumerate(self._datasets):
            if hasattr(dataset, "begin"):
                dataset.begin(seed + number, shuffle=shuffle)

    def state_at(self, index: int) -> dict[str, Any]:
        """Where the streams are when ``index`` is the next example, as plain data."""
        _, sources, _ = self._found(index)
        before = self._before(index // self._length * self._length)
        counts = np.bincount(sources[: index % self._length], minlength=len(self.names)).tolist()
        return {
            name: dataset.state_at(first + more)
            for name, dataset, first, more in zip(self.names, self._datasets, before, counts, strict=True)
            if hasattr(dataset, "state_at")
        }

    def go_to(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_at` returned."""
        for name, dataset in zip(self.names, self._datasets, strict=True):
            if name in state:
                dataset.go_to(state[name])

    def __getitem__(self, index: int) -> Any:
        """The example, with ``source`` in each of its documents."""
        number, row = self._place(index)
        return with_source(self._datasets[number][row], number, self.names)

    def read_ahead(self, steps: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
        """See :meth:`StreamedDataset.read_ahead`."""
        found: dict[int, list[tuple[Sequence[int], Sequence[int]]]] = {}
        for words, indices in steps:
            rows: dict[int, list[int]] = {}
            for index in indices:
                number, row = self._place(index)
                rows.setdefault(number, []).append(row)
            for number, its in rows.items():
                found.setdefault(number, []).append(((*words, number), its))
        for number, parts in found.items():
            if hasattr(self._datasets[number], "read_ahead"):
                self._datasets[number].read_ahead(parts)

    def origins(self, index: int) -> list[dict[str, Any]]:
        """``source`` and place of everything in an example."""
        number, row = self._place(index)
        return getattr(self._datasets[number], "origins", lambda row: [{"row": row}])(row)

    def _before(self, index: int) -> list[int]:
        """Examples of each dataset before an index that is a multiple of the block."""
        ends = [share * index // self._shares[-1] for share in self._shares]
        return [end - start for start, end in pairwise(ends)]

    def _found(self, index: int) -> tuple[int, np.ndarray, np.ndarray]:
        """The block of an index: its number, and of every example the dataset and its how manieth one it is."""
        block = index // self._length
        if block not in self._blocks:
            before, after = self._before(block * self._length), self._before((block + 1) * self._length)
            counts = [end - start for start, end in zip(before, after, strict=True)]
            random = random_of(self._seed, block, len(self.names))
            within = [random.random_sample(count) if self._shuffle else np.full(count, 0.5) for count in counts]
            turns = [(np.arange(len(one)) + one) / len(one) for one in within]
            order = np.argsort(np.concatenate(turns), kind="stable")
            sources = np.repeat(np.arange(len(counts)), counts)[order]
            numbers = np.concatenate([np.arange(*ends) for ends in zip(before, after, strict=True)])[order]
            self._blocks[block] = (block, sources, numbers)
            while len(self._blocks) > _KEPT:
                del self._blocks[next(iter(self._blocks))]
        return self._blocks[block]

    def _place(self, index: int) -> tuple[int, int]:
        """(dataset, index in it)."""
        _, sources, numbers = self._found(index)
        source, number = (int(values[index % self._length]) for values in (sources, numbers))
        dataset = self._datasets[source]
        if hasattr(dataset, "begin"):
            return source, number
        passes, row = divmod(number, len(dataset))
        if not self._shuffle:
            return source, row
        if self._passes.get(source, (None,))[0] != passes:
            self._passes[source] = (passes, random_of(self._seed, passes, source).permutation(len(dataset)))
        return source, int(self._passes[source][1][row])


def with_source(example: Any, number: int, names: tuple[str, ...]) -> Any:
    """An example or pack with ``source`` in each of its documents."""
    source = SourceNumber(number)
    source.names = names
    if isinstance(example, Mapping):
        return {**example, "source": source}
    return [{**document, "source": source} for document in example]


def mixture_weights(
    names: Sequence[str], sizes: Sequence[int], weights: Mapping[str, float] | None, temperature: float
) -> list[float]:
    """Shares of the datasets, which add up to 1. Raises :class:`DataError`, see :class:`MixedDataset`."""
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
    """Examples of every dataset in an epoch."""
    times = [size / weight for size, weight in zip(sizes, weights, strict=True)]
    if stop not in ("first", "all", "repeat"):
        raise DataError(f"stop must be first, all or repeat, not '{stop}'.")
    if stop == "all":
        return list(sizes)
    end = min(times) if stop == "first" else max(times)
    counts = [math.ceil(weight * end - 1e-6) for weight in weights]
    limit = min if stop == "first" else max
    return [limit(count, size) for count, size in zip(counts, sizes, strict=True)]


def mixed_dataset(
    tokenizer: Any,
    *,
    datasets: dict[str, Annotated[Component, RuntimeArgs("tokenizer")]],
    weights: dict[str, float] | None = None,
    temperature: float = 1.0,
    stop: Stop = "repeat",
) -> MixedDataset | MixedStream:
    """Datasets mixed by weight, with a loss for each of them in the metrics.

    Args:
        tokenizer: handed to every dataset.
        datasets: name -> node with ``_component_``, or a dataset.
        weights: see :class:`MixedDataset`, as the other arguments.
        temperature: see there.
        stop: see there.

    Raises:
        DataError: see :class:`MixedDataset` and the datasets.

    Example:
        >>> questions = {"_component_": "torchtune.datasets.instruct_dataset"}
        >>> questions["source"] = [{"input": "the cat", "output": "a bird"}] * 4
        >>> rows = [{"tokens": [n], "labels": [n]} for n in range(2)]
        >>> mixture = torchtune.datasets.mixed_dataset(tokenizer, datasets={"questions": questions, "rows": rows})
        >>> mixture.names, len(mixture)
        (('questions', 'rows'), 6)
    """
    if not datasets:
        raise DataError("datasets: the mixture is empty: give each dataset a name and a _component_.")
    mixture_weights(tuple(map(str, datasets)), [1] * len(datasets), weights, temperature)  # before rows are tokenized
    built = {
        name: instantiate_dataset(node, tokenizer) if isinstance(node, Mapping) else node
        for name, node in datasets.items()
    }
    if not any(getattr(dataset, "is_stream", False) for dataset in built.values()):
        return MixedDataset(built, weights, temperature, stop)
    if stop != "repeat":
        raise DataError(f"stop={stop} needs to know when a dataset ends, which a stream does not say: use stop=repeat.")
    return MixedStream(built, weights, temperature)
