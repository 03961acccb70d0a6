"""Cache of values per dataset row, which are computed once before training."""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from torchtune.data import Batch, BatchLoader, ExampleDataset, WrappedDataset
from torchtune.training import ParallelDims
from torchtune.utils import UserError, sign_of_life


class CacheError(UserError):
    """Raised for a cache that does not fit the run, is damaged, or cannot be written."""

    raised_on_all = True


def create_folder(folder: Path, setting: str) -> None:
    """Create a folder. Raises :class:`CacheError` if the folder is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError("it may not be written to")
    except OSError as error:
        raise CacheError(f"{setting}: {folder} cannot be written to ({error}): choose another folder.") from error


class WithRowNumbers(WrappedDataset):
    """Dataset with the row number as ``row`` in every document."""

    def __getitem__(self, index: int) -> Any:
        return _with_row_number(self.dataset[index], index)


class SelectedRows(ExampleDataset):
    """Some rows of a dataset, with their numbers in it as ``row`` in every document."""

    def __init__(self, dataset: Any, rows: np.ndarray) -> None:
        self._dataset = dataset
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        row = int(self._rows[index])
        return _with_row_number(self._dataset[row], row)


def _with_row_number(example: Any, row: int) -> Any:
    """Add ``row`` to an example, or to every document of a pack."""
    if isinstance(example, Mapping):
        return {**example, "row": row}
    return [{**document, "row": row} for document in example]


def uncached_batches(
    loader: BatchLoader, rows: np.ndarray, collate: Callable[[list[Any]], Batch], title: str, dims: ParallelDims
) -> Iterator[Batch]:
    """Yield batches of ``rows``, which are split among the ranks; show a progress bar on the first rank."""
    batches = BatchLoader(
        SelectedRows(loader.dataset, rows),
        batch_size=loader.batch_size,
        collate_fn=collate,
        shuffle=False,
        seed=loader.seed,
        rank=loader.rank,
        world_size=loader.world_size,
    )
    hides_bar = None if dims.is_main else True  # None: shown in a terminal
    for (batch,) in tqdm(batches, desc=title, total=len(batches), disable=hides_bar):
        sign_of_life()
        yield batch
