"""Log-probs of a reference, computed once, kept in a file by data and model, and handed out with the examples."""

import hashlib
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor, nn
from tqdm import tqdm

from torchtune.data import Batch, BatchLoader
from torchtune.training import ParallelDims
from torchtune.training.supervise._run_report import bits
from torchtune.utils import UserError, atomic_write, get_logger, is_simulated, log_rank_zero, sign_of_life

_SIDES = ("chosen", "rejected")


class CacheError(UserError):
    """Log-probs that cannot be kept."""

    told_by_rank_0 = True  # all ranks find the same


def make_folder(folder: Path, kind: type[UserError], setting: str) -> None:
    """Make a folder that is written to when all is computed; raise ``kind`` now where that would not be possible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError("it may not be written to")
    except OSError as error:
        raise kind(f"{setting}: {folder} cannot be written to ({error}): choose another folder.") from error


class WithReference:
    """A dataset of pairs with the reference log-probs in every example.

    Args:
        dataset: of pairs.
        log_probs: ``[rows, 2]``, of the chosen and of the rejected answers.
    """

    def __init__(self, dataset: Any, log_probs: np.ndarray) -> None:
        self._dataset, self._log_probs = dataset, log_probs

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The example with ``chosen_reference`` and ``rejected_reference``."""
        pair = zip(_SIDES, self._log_probs[index].tolist(), strict=True)
        return {**self._dataset[index], **{f"{side}_reference": value for side, value in pair}}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)


class _Rows:
    """Some rows of a dataset, which say which ones they are."""

    def __init__(self, dataset: Any, rows: np.ndarray) -> None:
        self._dataset, self._rows = dataset, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self._dataset[int(self._rows[index])], "row": int(self._rows[index])}


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
    """Loaders whose examples have log-probs of the reference: what is not in the folder is computed, and kept.

    Args:
        loaders: of pairs.
        score: a batch to the log-probs of its documents ``[n]``.
        parameters: of the reference, by name, that decide what it says.
        dims: the processes.
        folder: of the files; one for each pair of data and model.
        epochs: of the run; rows that it does not come to are left out.

    Raises:
        CacheError: the data change from reading to reading, are no pairs, or a file is damaged.
    """
    if is_simulated():  # nothing is computed, and nothing kept
        zeros = (np.zeros((len(loader.dataset), 2), np.float32) for loader in loaders)
        return [
            loader.derive(dataset=WithReference(loader.dataset, rows))
            for loader, rows in zip(loaders, zeros, strict=True)
        ]
    make_folder(Path(folder), CacheError, "reference_cache")
    of_model, found = _fingerprint(parameters, dims), []
    for loader in loaders:
        data = loader.dataset
        if getattr(data, "fingerprint", None) is None:
            raise CacheError(
                f"reference_cache: {type(data).__name__} has no fingerprint, so its rows may change: set it to null."
            )
        if "chosen_input_ids" not in data[0]:
            raise CacheError("reference_cache: it keeps log-probs of pairs, which these data are not: set it to null.")
        key = hashlib.sha256(repr((data.fingerprint, len(data), of_model)).encode()).hexdigest()[:16]
        path = Path(folder) / f"reference_{key}.safetensors"
        known = _read(path, len(data))
        visited = loader.visited(epochs)
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


def _fingerprint(parameters: Sequence[tuple[str, nn.Parameter]], dims: ParallelDims) -> tuple[str, int]:
    """Changes when a name, a dtype or any bit of the model does."""
    names = repr([(name, value.dtype) for name, value in parameters])
    sums = (sum(map(int, bits(value))) for _, value in parameters)
    total = sum((place + 1) * value for place, value in enumerate(sums)) % 2**40  # a sum of float64 is exact there
    return hashlib.sha256(names.encode()).hexdigest(), dims.exchange([total])[0][0]


def _read(path: Path, rows: int) -> np.ndarray:
    """float32 ``[rows, 2]``, not a number where nothing is known."""
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
    """(row, [chosen, rejected]) of rows, which the processes share."""
    batches = BatchLoader(
        _Rows(loader.dataset, rows),
        batch_size=loader.batch_size,
        collate_fn=loader.collate_fn,
        shuffle=False,
        seed=loader.seed,
        rank=loader.rank,
        world_size=loader.world_size,
    )
    mine: dict[int, list[float]] = {}
    for (batch,) in tqdm(batches, desc="Reference", total=len(batches), disable=None if dims.is_main else True):
        sign_of_life()
        numbers, _ = batch.chosen_and_rejected(batch.per_document["row"])
        pairs = torch.stack(batch.chosen_and_rejected(score(batch).cpu().float()), dim=1)
        mine |= dict(zip(numbers.tolist(), pairs.tolist(), strict=True))
    for part in dims.gather(mine):
        yield from part.items()
