"""Concatenation of datasets."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from torchtune.data import DataError
from torchtune.datasets._packed import PackedDataset, origins_of


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
