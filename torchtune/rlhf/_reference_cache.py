"""Cache of reference log-probs, with one file per dataset and model."""

import hashlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor, nn

from torchtune.data import Batch, BatchLoader, WrappedDataset
from torchtune.rlhf._row_cache import CacheError, create_folder, uncached_batches
from torchtune.training import ParallelDims, fingerprint_weights
from torchtune.utils import atomic_write, get_logger, is_simulated, log_rank_zero

_SIDES = ("chosen", "rejected")


class WithReference(WrappedDataset):
    """Dataset of pairs with reference log-probs in every example.

    Args:
        dataset: dataset of pairs.
        log_probs: log-probs of the chosen and the rejected answers, ``[rows, 2]``.
    """

    def __init__(self, dataset: Any, log_probs: np.ndarray) -> None:
        super().__init__(dataset)
        self._log_probs = log_probs

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the example with ``chosen_reference`` and ``rejected_reference``."""
        pair = zip(_SIDES, self._log_probs[index].tolist(), strict=True)
        return {**self.dataset[index], **{f"{side}_reference": value for side, value in pair}}


@torch.no_grad()
def cache_log_probs(
    loaders: Sequence[BatchLoader],
    score: Callable[[Batch], Tensor],
    *,
    parameters: Sequence[tuple[str, nn.Parameter]],
    dims: ParallelDims,
    folder: str,
    epochs: int,
) -> list[BatchLoader]:
    """Compute and cache missing reference log-probs, and return loaders that add them to the examples.

    Args:
        loaders: loaders of pairs.
        score: function of a batch that returns the log-probs of its documents ``[n]``.
        parameters: (name, parameter) pairs of the reference, for its fingerprint.
        dims: parallel dims.
        folder: folder of the cache, with one file per dataset and model.
        epochs: number of epochs of the run; rows that are not visited in these epochs are skipped.

    Raises:
        CacheError: the dataset has no fingerprint, its examples are not pairs, or a file is damaged.
    """
    if is_simulated():  # a simulated run computes and writes nothing
        zeros = (np.zeros((len(loader.dataset), 2), np.float32) for loader in loaders)
        return [
            loader.derive(dataset=WithReference(loader.dataset, rows))
            for loader, rows in zip(loaders, zeros, strict=True)
        ]
    create_folder(Path(folder), "reference_cache")
    of_model, found = fingerprint_weights(parameters, dims), []
    for loader in loaders:
        data = loader.dataset
        if data.fingerprint is None:
            raise CacheError(
                f"reference_cache: {type(data).__name__} has no fingerprint, so its rows may change: set it to null."
            )
        if "chosen_input_ids" not in data[0]:
            raise CacheError("reference_cache: it keeps log-probs of pairs, which these data are not: set it to null.")
        key = hashlib.sha256(repr((data.fingerprint, len(data), of_model)).encode()).hexdigest()[:16]
        path = Path(folder) / f"reference_{key}.safetensors"
        known = _read(path, len(data))
        visited = loader.visited_indices(epochs)
        missing = visited[np.isnan(known[visited]).any(axis=1)]
        if dims.any(len(missing) > 0):
            log_rank_zero(get_logger(), f"Computing log-probs of the reference for {len(missing):,} rows, once: {path}")
            for row, pair in _compute(loader, missing, score, dims):
                known[row] = pair
            if dims.is_main:
                with atomic_write(path) as file:
                    file.write(save({"log_probs": known}, {"crc32": str(zlib.crc32(known.tobytes()))}))
        found.append(loader.derive(dataset=WithReference(data, known)))
    return found


def _read(path: Path, rows: int) -> np.ndarray:
    """Read a cache file: float32 ``[rows, 2]``, NaN for missing rows."""
    if not path.exists():
        return np.full((rows, 2), np.nan, dtype=np.float32)
    try:
        with safe_open(path, framework="np") as file:
            found = file.get_tensor("log_probs")
            crc32 = (file.metadata() or {}).get("crc32")
    except (OSError, SafetensorError) as error:
        raise CacheError(f"{path}: it cannot be read ({error}): delete it, and it is computed again.") from error
    if found.shape != (rows, 2):
        raise CacheError(f"{path}: it has the shape {list(found.shape)}, not [{rows}, 2]: delete it.")
    if crc32 is not None and crc32 != str(zlib.crc32(found.tobytes())):
        raise CacheError(f"{path}: it is damaged, its checksum is another one: delete it, and it is computed again.")
    return found


def _compute(
    loader: BatchLoader, rows: np.ndarray, score: Callable[[Batch], Tensor], dims: ParallelDims
) -> Iterator[tuple[int, list[float]]]:
    """Yield (row, [chosen, rejected]) for all rows; the ranks split the rows."""
    mine: dict[int, list[float]] = {}
    for batch in uncached_batches(loader, rows, loader.collate_fn, "Reference", dims):
        numbers, _ = batch.chosen_and_rejected(batch.per_document["row"])
        pairs = torch.stack(batch.chosen_and_rejected(score(batch).cpu().float()), dim=1)
        mine |= dict(zip(numbers.tolist(), pairs.tolist(), strict=True))
    for part in dims.gather(mine):
        yield from part.items()
