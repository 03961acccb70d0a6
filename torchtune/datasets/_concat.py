"""Several datasets as one."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from torchtune.data import DataError
from torchtune.datasets._packed import PackedDataset


class ConcatDataset(Dataset):
    """One dataset after another.

    Args:
        datasets: all packed, or none.

    Raises:
        DataError: there are none, packed and other datasets are mixed, or one is streamed.

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
    def fingerprint(self) -> tuple[Any, ...]:
        """Changes when any part's does."""
        return tuple(getattr(dataset, "fingerprint", None) for dataset in self._datasets)

    @property
    def lengths(self) -> np.ndarray:
        """int64 [examples]: tokens of every example."""
        return np.concatenate([np.asarray(dataset.lengths) for dataset in self._datasets])

    @property
    def num_images(self) -> int:
        """Images of all rows. Raises ``AttributeError`` if a part does not know, as if this had no such attribute."""
        return sum(dataset.num_images or 0 for dataset in self._datasets)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        """The example, from the dataset that holds it."""
        dataset, row = self._locate(index)
        return dataset[row]

    def origins(self, index: int) -> list[dict[str, Any]]:
        """``source`` and ``row`` of everything in an example."""
        dataset, row = self._locate(index)
        return dataset.origins(row) if hasattr(dataset, "origins") else [{"row": row}]

    def _locate(self, index: int) -> tuple[Any, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        index %= len(self)
        part = int(np.searchsorted(self._ends, index, side="right"))
        return self._datasets[part], index - int(self._ends[part - 1]) if part else index
