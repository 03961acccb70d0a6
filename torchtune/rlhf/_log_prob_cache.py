"""Log-probs of frozen models, computed once per row of a dataset before training: a reference's, and a teacher's."""

import dataclasses
import functools
import hashlib
import json
import os
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import BadZipFile

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor, nn
from tqdm import tqdm

from torchtune import config
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, Batch, BatchLoader, DataError, ExampleDataset, WrappedDataset
from torchtune.generation import evaluating
from torchtune.modules.loss import LikeliestTokens, TeacherOutputs
from torchtune.rlhf._reference import equals_base, not_needed_error, score_documents
from torchtune.rlhf._teacher import Teacher, TeacherError, check_top_k, top_k_of
from torchtune.rlhf.loss import AnswerLoss
from torchtune.supervision import StepPlan
from torchtune.training.parallel import ParallelDims, Ranks, broadcast_object, fingerprint_weights, reshard
from torchtune.utils import (
    FolderLock,
    UserError,
    atomic_write,
    get_logger,
    is_simulated,
    log_rank_zero,
    sign_of_life,
    write_json,
)

# Name of the per-token entry with positions in the cache.
CACHE_POSITIONS = "teacher_at"

# Files of a cache: what it was computed from; offsets, checksums and flags of the rows; tokens ``[n, k]`` and
# log-probs ``[n, k + 1]`` of all labeled positions, as plain arrays of 4-byte values.
_KEY_FILE = "teacher.json"
_ROWS_FILE = "rows.npz"
_TOKENS_FILE = "tokens.int32"
_LOG_PROBS_FILE = "log_probs.float32"
_VALUE_BYTES = 4

# How long the ranks wait to see a file of the first rank in the folder.
_SECONDS_TO_SEE = 90.0

# Function that returns the teacher's most likely tokens at the labels of a batch.
Likeliest = Callable[[Batch], LikeliestTokens]


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
        chosen, rejected = self._log_probs[index].tolist()
        return {**self.dataset[index], "chosen_reference": chosen, "rejected_reference": rejected}


@torch.no_grad()
def cache_reference(
    loaders: Sequence[BatchLoader | None],
    loss: AnswerLoss,
    policy: nn.Module,
    second: nn.Module | None,
    dims: ParallelDims,
    *,
    folder: str,
    epochs: int,
) -> list[BatchLoader | None]:
    """Compute reference log-probs once, cache them in a folder, and return loaders that add them to the examples.

    Args:
        loaders: loaders of pairs; None stays None.
        loss: loss that scores documents.
        policy: the model to train, with its initial weights.
        second: reference model from :func:`load_reference`; None: the policy with its initial weights.
        dims: parallel dims; all ranks must call this function.
        folder: folder of the cache, with one file per dataset and model.
        epochs: number of epochs of the run; rows that are not visited in these epochs are skipped.

    Raises:
        ReferenceError: the loss needs no reference.
        UserError: the data cannot be cached, or the folder cannot be written to.

    Example:
        >>> (loader,) = rlhf.cache_reference([loader], loss, model, None, dims, folder="cache", epochs=1)
        ... # doctest: +SKIP
    """
    if not loss.needs_reference:
        raise not_needed_error("reference_cache", loss)
    model = policy if second is None else second
    device = next(model.parameters()).device

    def score(batch: Batch) -> Tensor:
        return score_documents(loss, model, batch.to(device), dims)

    # The fingerprint leaves out adapters with output 0: their random matrices do not change the reference.
    frozen_only = second is None and equals_base(policy, dims)
    parameters = []
    for name, parameter in model.named_parameters():
        if not (frozen_only and parameter.requires_grad):
            parameters.append((name, parameter))
    model_fingerprint = None
    if not is_simulated():
        create_folder(Path(folder), "reference_cache")  # raises before the weights are read and rows are scored
        model_fingerprint = fingerprint_weights(parameters, dims)

    cached_loaders: list[BatchLoader | None] = []
    with evaluating(model):
        for loader in loaders:
            if loader is None:
                cached_loaders.append(None)
                continue
            if is_simulated():  # a simulated run computes and writes nothing
                log_probs = np.zeros((len(loader.dataset), 2), np.float32)
            else:
                log_probs = _cached_log_probs(loader, score, Path(folder), model_fingerprint, epochs, dims)
            cached_loaders.append(loader.derive(dataset=WithReference(loader.dataset, log_probs)))
    reshard(model)  # otherwise FSDP keeps weights unsharded
    return cached_loaders


def _cached_log_probs(
    loader: BatchLoader,
    score: Callable[[Batch], Tensor],
    folder: Path,
    model_fingerprint: Any,
    epochs: int,
    dims: ParallelDims,
) -> np.ndarray:
    """Return the log-probs of the rows that a run visits, float32 ``[rows, 2]``; compute and write missing ones.

    Rows that the run does not visit are NaN, unless another run has cached them. All ranks must call this function.

    Args:
        loader: loader of pairs.
        score: function of a batch that returns the log-probs of its documents ``[n]``.
        folder: folder of the cache.
        model_fingerprint: fingerprint of the reference.
        epochs: number of epochs of the run.
        dims: parallel dims.

    Raises:
        CacheError: the dataset has no fingerprint, its examples are not pairs, or a file is damaged.
    """
    data = loader.dataset
    if data.fingerprint is None:
        raise CacheError(
            f"reference_cache: {type(data).__name__} has no fingerprint, so its rows may change: set it to null."
        )
    if "chosen_input_ids" not in data[0]:
        raise CacheError("reference_cache: it keeps log-probs of pairs, which these data are not: set it to null.")
    # The file's name is a digest of all that the log-probs depend on: another run finds a file of its own.
    key = hashlib.sha256(repr((data.fingerprint, len(data), model_fingerprint)).encode())
    path = folder / f"reference_{key.hexdigest()[:16]}.safetensors"
    # The first rank's file counts for all: machines without a common folder have different files, and all ranks must
    # miss the same rows, because they run the same batches.
    log_probs = Ranks(CacheError).run_on_rank_0(lambda: _read_log_probs(path, len(data)))  # [rows, 2]
    visited = loader.visited_indices(epochs)
    # NaN stands for a row that no run has computed.
    missing = visited[np.isnan(log_probs[visited]).any(axis=1)]
    if not len(missing):
        return log_probs
    log_rank_zero(get_logger(), f"Computing log-probs of the reference for {len(missing):,} rows, once: {path}")
    pairs_by_row: dict[int, list[float]] = {}  # [chosen, rejected], of the rows of this rank
    for batch in uncached_batches(loader, missing, loader.collate_fn, "Reference", dims):
        row_numbers, _ = batch.chosen_and_rejected(batch.per_document["row"])  # both answers of a pair have its row
        chosen, rejected = batch.chosen_and_rejected(score(batch).cpu().float())
        pairs = torch.stack([chosen, rejected], dim=1)  # [p, 2]
        pairs_by_row.update(zip(row_numbers.tolist(), pairs.tolist(), strict=True))
    # Every rank gets all rows: its loader visits other rows in training than it computed here.
    for rank_pairs in dims.gather(pairs_by_row):
        for row, pair in rank_pairs.items():
            log_probs[row] = pair
    if dims.is_main:
        checksum = str(zlib.crc32(log_probs.tobytes()))  # by which `_read_log_probs` finds a damaged file
        with atomic_write(path) as file:
            file.write(save({"log_probs": log_probs}, {"crc32": checksum}))
    return log_probs


def _read_log_probs(path: Path, num_rows: int) -> np.ndarray:
    """Read a cache file: float32 ``[rows, 2]``, NaN for missing rows."""
    if not path.exists():
        return np.full((num_rows, 2), np.nan, dtype=np.float32)
    try:
        with safe_open(path, framework="np") as file:
            log_probs = file.get_tensor("log_probs")
            checksum = (file.metadata() or {}).get("crc32")  # files of earlier releases have none
    except (OSError, SafetensorError) as error:
        raise CacheError(f"{path}: it cannot be read ({error}): delete it, and it is computed again.") from error
    if log_probs.shape != (num_rows, 2):
        raise CacheError(f"{path}: it has the shape {list(log_probs.shape)}, not [{num_rows}, 2]: delete it.")
    if checksum is not None and checksum != str(zlib.crc32(log_probs.tobytes())):
        raise CacheError(f"{path}: it is damaged, its checksum is another one: delete it, and it is computed again.")
    return log_probs


def cache_teacher(
    loaders: Sequence[BatchLoader | None],
    load: Callable[[], Teacher],
    student: nn.Module,
    kd_loss: Any,
    dims: ParallelDims,
    *,
    cfg: Any,
    source: Any,
) -> tuple[list[BatchLoader | None], "CachedTeacher"]:
    """Cache the teacher's most likely tokens in a folder; the teacher is loaded only if tokens are missing.

    Args:
        loaders: loaders of the training and validation data; None stays None.
        load: function that returns the teacher, see :func:`load_teacher`.
        student: the trained model.
        kd_loss: loss with ``top_k``, the number of tokens to cache per position.
        dims: parallel dims; all ranks must call this function.
        cfg: settings with ``teacher_model``, ``teacher_cache`` (the folder), ``dtype``, ``epochs`` and ``max_steps``.
        source: source of the teacher's weights.

    Returns:
        Loaders that add cache positions to their batches, and the teacher for these batches.

    Raises:
        TeacherError: the loss has no ``top_k``.
        UserError: the folder has the cache of a different run.

    Example:
        >>> loaders, teacher = rlhf.cache_teacher(loaders, load, model, kd_loss, dims, cfg=cfg, source=source)
        ... # doctest: +SKIP
    """
    top_k = top_k_of(kd_loss)
    if top_k is None:
        raise TeacherError("teacher_cache: it keeps a teacher's likeliest tokens: set kd_loss.top_k, such as 64.")
    with torch.device("meta"):  # sizes only: the weights are not needed if all tokens are cached
        teacher_model = config.instantiate(cfg.teacher_model)
    # Distributions are over the tokens that both models have.
    num_compared = min(len(teacher_model.tok_embeddings.weight), len(student.tok_embeddings.weight))
    check_top_k(top_k, num_compared)
    description = getattr(teacher_model, "description", None)  # the architecture; a user's model may lack it
    # Everything besides the data that the cached log-probs depend on.
    key = {
        "teacher": source.fingerprint,
        "teacher_model": zlib.crc32(repr(description).encode()),
        "dtype": cfg.dtype,
        "vocabulary": num_compared,
        "kd_loss.top_k": top_k,
        "kd_loss.temperature": kd_loss.temperature,
    }

    # All caches are opened before the teacher runs: a cache of another run is an error, at once and not hours later.
    names = ("train", "val")  # subfolders; without validation data, the second loader is None or missing
    caches: dict[str, tuple[int, TeacherCache]] = {}  # with the first position
    num_positions = 0  # positions are unique: those of a cache begin where those of the cache before it end
    for name, loader in zip(names, loaders, strict=False):
        if loader is not None:
            cache = TeacherCache(Path(cfg.teacher_cache) / name, loader.dataset, key, top_k)
            caches[name] = (num_positions, cache)
            num_positions += int(cache.offsets[-1])

    load_once = functools.cache(load)  # at the first missing row; training and validation data share the teacher

    @torch.no_grad()
    def likeliest(batch: Batch) -> LikeliestTokens:
        teacher = load_once()
        batch = batch.to(next(teacher.model.parameters()).device)
        with teacher(batch) as outputs:
            return kd_loss.likeliest(batch.labels, outputs, num_compared)

    cached_loaders: list[BatchLoader | None] = []
    for name, loader in zip(names, loaders, strict=False):
        if loader is None:
            cached_loaders.append(None)
            continue
        first_position, cache = caches[name]
        cached_loaders.append(
            fill_and_use_cache(
                loader,
                cache,
                likeliest,
                first_position=first_position,
                epochs=StepPlan.of(cfg).count_epochs(len(loader)),
                dims=dims,
            )
        )
    return cached_loaders, CachedTeacher(list(caches.values()), num_compared, kd_loss.temperature)


class CachedTeacher:
    """Teacher outputs read from a cache, without a model in memory.

    Args:
        caches: ``(first position, cache)``, ascending.
        vocab_size: number of tokens in the normalization of the distributions.
        temperature: temperature of the distributions.
    """

    def __init__(self, caches: Sequence[tuple[int, "TeacherCache"]], vocab_size: int, temperature: float) -> None:
        self._caches = caches
        self._vocab_size = vocab_size
        self._temperature = temperature

    @contextmanager
    def __call__(self, batch: Batch) -> Iterator[TeacherOutputs]:
        """Context manager that yields the cached outputs for a batch; see :class:`Teacher`."""
        yield CachedOutputs(self._caches, batch.per_token[CACHE_POSITIONS], self._vocab_size, self._temperature)


class CachedOutputs:
    """Cached outputs at the positions of a batch; see :class:`torchtune.modules.loss.TeacherOutputs`.

    Args:
        caches: ``(first position, cache)``, ascending.
        positions: positions in the caches, int64 ``[b, s]``; -1 at tokens without a label.
        vocab_size: number of tokens in the normalization of the distributions.
        temperature: temperature of the distributions.
    """

    are_likeliest = True

    def __init__(
        self, caches: Sequence[tuple[int, "TeacherCache"]], positions: Tensor, vocab_size: int, temperature: float
    ) -> None:
        self._caches = caches
        self._positions = positions
        self.vocab_size = vocab_size
        self._temperature = temperature

    def select(self, index: Tensor, vocab_size: int) -> LikeliestTokens:
        """Read the tokens at indices into the flattened batch, int64 ``[n]``.

        Raises :class:`CacheError` if the batch does not match the cache.
        """
        positions = self._positions.flatten()[index].cpu().numpy()  # [n]
        # The cached log-probs are normalized over vocab_size tokens, and a position of -1 has none.
        if vocab_size != self.vocab_size or (positions < 0).any():
            raise CacheError("teacher_cache: a batch has labels or tokens that are not in it: set it to null.")
        # All rows of a batch are of one dataset, so its first position determines the cache. Without a position,
        # nothing is read, and any cache will do.
        first_position, cache = self._caches[-1]
        if len(positions):
            for start, candidate in self._caches:
                if start <= positions[0]:  # ascending: the last one that fits
                    first_position = start
                    cache = candidate
        tokens, log_probs = cache.read(positions - first_position)
        return LikeliestTokens(
            torch.from_numpy(tokens).to(index.device).long(),
            torch.from_numpy(log_probs).to(index.device),
            vocab_size,
            self._temperature,
        )


class TeacherCache:
    """Cache of one dataset in a folder; each row has an offset at which the values of its labeled tokens begin.

    Args:
        folder: folder of the files.
        data: dataset of documents or packs, with a ``fingerprint``.
        key: everything besides the data that the log-probs depend on, as JSON values by name.
        k: number of tokens per position.

    Attributes:
        offsets: int64 ``[rows + 1]``: the values of a row are from its offset up to the offset of the next row.

    Raises:
        CacheError: the dataset has no fingerprint, the cache has other data or another key, or a file is damaged.
    """

    def __init__(self, folder: Path, data: Any, key: Mapping[str, Any], k: int) -> None:
        if data.fingerprint is None:
            raise CacheError(
                f"teacher_cache: {type(data).__name__} has no fingerprint, so its rows may change: set it to null."
            )
        self.folder = folder
        self._num_rows = len(data)
        self._k = k
        full_key = {**key, "data (rows, template, masks)": [self._num_rows, data.fingerprint]}
        self._key = json.loads(json.dumps(full_key))  # as it is read from the file: tuples are lists there
        self._files: tuple[np.ndarray, np.ndarray] | None = None  # tokens and log-probs, memory-mapped when read
        if (folder / _KEY_FILE).exists():  # written last, so the other files are there
            self._check_key()
            self._read_rows()
            return
        # A new cache: the labels of every row are counted, for the offsets. The checksums of the rows show later
        # whether the dataset still returns the same tokens.
        counts = np.zeros(self._num_rows, np.int64)
        self._row_checksums = np.zeros(self._num_rows, np.uint32)
        for row in tqdm(range(self._num_rows), desc="Counting labels", disable=None):
            sign_of_life()  # the watchdog must not take this loop for a stall
            counts[row], self._row_checksums[row] = _count_and_checksum(data[row])
        self.offsets = np.concatenate([np.zeros(1, np.int64), counts.cumsum()])
        self._is_cached = np.zeros(self._num_rows, bool)
        self._value_checksums = np.zeros(self._num_rows, np.uint32)

    def _check_key(self) -> None:
        """Check that the cache was computed from the same data, teacher and settings."""
        path = self.folder / _KEY_FILE
        try:
            key = json.loads(path.read_text(encoding="utf-8"))
            changed = [name for name in self._key if key[name] != self._key[name]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CacheError(f"{path} is damaged ({error}): delete {self.folder}.") from error
        if not changed:
            return
        changes = []
        for name in changed:
            is_fingerprint = len(str(key[name])) >= 20  # longer than a setting; a digest tells the user nothing
            if is_fingerprint:
                changes.append(name)
            else:
                changes.append(f"{name} (was {key[name]}, is {self._key[name]})")
        raise CacheError(
            f"teacher_cache: {self.folder} was filled for a run that differs in {', '.join(changes)}: set it to a new "
            "folder, or delete this one."
        )

    def _read_rows(self) -> None:
        """Read offsets, flags and checksums of the rows; check that the files have the values of all cached rows."""
        path = self.folder / _ROWS_FILE
        try:
            with path.open("rb") as opened, np.load(opened, allow_pickle=False) as arrays:
                self.offsets = arrays["offsets"]
                self._row_checksums = arrays["sums"]
                self._is_cached = arrays["known"]
                self._value_checksums = arrays["contents"]
            tokens_size = (self.folder / _TOKENS_FILE).stat().st_size
            log_probs_size = (self.folder / _LOG_PROBS_FILE).stat().st_size
        except (OSError, ValueError, KeyError, EOFError, zlib.error, BadZipFile) as error:
            raise CacheError(f"{path}: it cannot be read ({error}): delete {self.folder}.") from error
        ends = self.offsets[1:]
        num_positions = int(ends[self._is_cached].max(initial=0))  # up to the end of the last cached row
        # The files may be longer: a run that was killed leaves values of rows that are not marked as cached.
        lacks_rows = len(self._is_cached) != self._num_rows
        lacks_tokens = tokens_size < _VALUE_BYTES * num_positions * self._k
        lacks_log_probs = log_probs_size < _VALUE_BYTES * num_positions * (self._k + 1)
        if lacks_rows or lacks_tokens or lacks_log_probs:
            raise CacheError(f"{self.folder}: its files are too short, so a part of it is lost: delete it.")

    def missing(self, rows: np.ndarray) -> np.ndarray:
        """Return the rows that are not cached yet."""
        return rows[~self._is_cached[rows]]

    def check_unchanged(self, rows: Sequence[int], examples: Sequence[Any]) -> None:
        """Check that examples and their cached values have not changed.

        Raises:
            DataError: an example has changed.
            CacheError: the cached values of an example are damaged.
        """
        for row, example in zip(rows, examples, strict=True):
            count, checksum = _count_and_checksum(example)
            # A filler batch has no labels: the loader removed them, so its checksum differs.
            if count and checksum != self._row_checksums[row]:
                raise DataError(
                    f"teacher_cache: row {row} of the data is not what {self.folder} was filled from: delete the "
                    "folder, and do not draw examples at random."
                )
            if self._is_cached[row] and self._checksum_of(row) != self._value_checksums[row]:
                raise CacheError(
                    f"{self.folder}: what is kept of row {row} is damaged, its checksum is another one: delete the "
                    "folder, and it is computed again."
                )

    def _checksum_of(self, row: int) -> int:
        """Return a checksum of a row's cached values; 0 for a row without values."""
        start = self.offsets[row]
        stop = self.offsets[row + 1]
        if start == stop:
            return 0
        tokens, log_probs = self.read(slice(start, stop))
        return zlib.crc32(log_probs.tobytes(), zlib.crc32(tokens.tobytes()))

    @contextmanager
    def writing(self, rows: np.ndarray) -> Iterator[Callable[[np.ndarray, np.ndarray, np.ndarray], None]]:
        """Context manager that yields a function to write cached values.

        The function takes positions ``[n]`` with their tokens ``[n, k]`` and log-probs ``[n, k + 1]``. The rows become
        valid when the context ends, so a killed run computes them again.

        Args:
            rows: rows whose values are all written inside the context.
        """
        create_folder(self.folder, "teacher_cache")
        tokens_path = self.folder / _TOKENS_FILE
        log_probs_path = self.folder / _LOG_PROBS_FILE
        with FolderLock(self.folder, key="teacher_cache").held():
            try:
                tokens_path.touch()  # mode r+b, which keeps the values of earlier runs, needs an existing file
                log_probs_path.touch()
                with tokens_path.open("r+b") as tokens_file, log_probs_path.open("r+b") as log_probs_file:

                    def write(positions: np.ndarray, tokens: np.ndarray, log_probs: np.ndarray) -> None:
                        _write_at(tokens_file, positions, tokens)
                        _write_at(log_probs_file, positions, log_probs)

                    yield write
                    for file in (tokens_file, log_probs_file):
                        file.flush()
                        os.fsync(file.fileno())
            except OSError as error:
                raise CacheError(f"{self.folder}: it cannot be written to ({error}).") from error

            self._files = None  # the maps of the files end before the new values
            for row in rows:  # read back from the files
                self._value_checksums[row] = self._checksum_of(row)
            self._is_cached[rows] = True
            # After the values: a row that is marked as cached is complete.
            with atomic_write(self.folder / _ROWS_FILE) as file:
                np.savez(
                    file,
                    offsets=self.offsets,
                    sums=self._row_checksums,
                    known=self._is_cached,
                    contents=self._value_checksums,
                )
            # Last: a folder without a key counts as a new cache, whatever a killed run has left in it.
            write_json(self.folder / _KEY_FILE, self._key)

    def reload(self) -> None:
        """Read the files again after another process has written them."""
        self._files = None
        self._read_rows()

    def read(self, positions: np.ndarray | slice) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens, int32 ``[n, k]``, and log-probs, float32 ``[n, k + 1]``, at positions ``[n]``."""
        if self._files is None:
            tokens = np.memmap(self.folder / _TOKENS_FILE, np.int32, "r")
            log_probs = np.memmap(self.folder / _LOG_PROBS_FILE, np.float32, "r")
            self._files = (tokens.reshape(-1, self._k), log_probs.reshape(-1, self._k + 1))
        tokens, log_probs = self._files
        return tokens[positions], log_probs[positions]


def _write_at(file: BinaryIO, positions: np.ndarray, values: np.ndarray) -> None:
    """Write values ``[n, width]`` of 4 bytes at their positions ``[n]``, adjacent positions in one write."""
    bytes_per_position = _VALUE_BYTES * values.shape[1]
    run_starts = np.flatnonzero(np.diff(positions) != 1) + 1  # where a run of adjacent positions begins
    for run in np.split(np.arange(len(positions)), run_starts):
        if len(run):  # there is one empty run if there are no positions
            file.seek(int(positions[run[0]]) * bytes_per_position)
            file.write(values[run].tobytes())


def _count_and_checksum(example: Any) -> tuple[int, int]:
    """Return the number of labels of an example or pack, and a checksum of its tokens and labels."""
    documents = [example] if isinstance(example, Mapping) else example
    count = 0
    checksum = 0
    for document in documents:
        tokens = np.asarray(document["tokens"], dtype=np.int64)
        labels = np.asarray(document["labels"], dtype=np.int64)
        count += int((labels != CROSS_ENTROPY_IGNORE_IDX).sum())
        checksum = zlib.crc32(labels.tobytes(), zlib.crc32(tokens.tobytes(), checksum))
    return count, checksum


def fill_and_use_cache(
    loader: BatchLoader,
    cache: TeacherCache,
    likeliest: Likeliest,
    *,
    first_position: int,
    epochs: int,
    dims: ParallelDims,
) -> BatchLoader:
    """Compute the missing rows, and return a loader that adds cache positions to its batches.

    Args:
        loader: loader of the data.
        cache: cache of the loader's dataset.
        likeliest: function that returns the teacher's most likely tokens at the labels of a batch.
        first_position: offset of the positions, which makes them unique among several caches.
        epochs: number of epochs of the run; rows that are not visited in these epochs are skipped.
        dims: parallel dims; all ranks must call this function.
    """
    # Positions are matched with all labels of a batch, so the batch is split over context-parallel ranks afterward.
    collate = ParallelDims.unsharded_collate(loader.collate_fn)

    def with_positions(numbered_examples: list[Any]) -> Batch:
        """Collate examples with row numbers; add the positions of their labels in the cache."""
        rows = []
        examples = []
        for numbered in numbered_examples:
            if isinstance(numbered, Mapping):
                rows.append(numbered["row"])
                examples.append(_without_row_number(numbered))
            else:  # a pack, whose documents all have the number of its row
                rows.append(numbered[0]["row"])
                examples.append([_without_row_number(document) for document in numbered])
        cache.check_unchanged(rows, examples)
        batch = collate(examples)
        is_labeled = batch.labels != CROSS_ENTROPY_IGNORE_IDX
        positions = torch.full_like(batch.labels, -1)
        num_labels = int(is_labeled.sum())
        if num_labels:  # none in a filler batch, whose labels the loader removed, although its rows have values
            # The labels of a batch are in the order of its rows, and so are the values of a row in the cache.
            row_positions = []
            for row in rows:
                row_positions.append(torch.arange(cache.offsets[row], cache.offsets[row + 1]))
            label_positions = torch.cat(row_positions)
            if len(label_positions) != num_labels:
                raise DataError(
                    f"collate_fn: it makes {num_labels} labels where the cache has {len(label_positions)} values, so "
                    "nobody can tell which of teacher_cache they are: use torchtune.data.collate_documents, or set "
                    "teacher_cache to null."
                )
            positions[is_labeled] = label_positions + first_position
        return dataclasses.replace(batch, per_token={**batch.per_token, CACHE_POSITIONS: positions})

    sharded_collate = dims.collate(with_positions)
    missing = cache.missing(loader.visited_indices(epochs))
    # All ranks must run the same batches, and later read the same files.
    missing_rows = missing.tobytes()
    if dims.any(missing_rows != broadcast_object(missing_rows)):
        raise CacheError(
            f"teacher_cache: {cache.folder} has other rows on another rank: set it to a folder that all machines share."
        )
    if len(missing):
        _check_common_folder(cache.folder)
        log_rank_zero(get_logger(), f"Running the teacher on {len(missing):,} rows, once: {cache.folder}")
        _compute_missing(loader, cache, missing, sharded_collate, likeliest, first_position, dims)
    return loader.derive(dataset=WithRowNumbers(loader.dataset), collate_fn=sharded_collate)


def _check_common_folder(folder: Path) -> None:
    """Check that all ranks see what the first rank writes to a folder, before the teacher runs for hours. A collective.

    Raises:
        CacheError: on all ranks, if one does not see it.
    """
    ranks = Ranks(CacheError)

    def write_mark() -> str:
        create_folder(folder, "teacher_cache")
        name = f".seen_by_all_{uuid.uuid4().hex[:12]}"
        (folder / name).touch()
        return name

    mark = folder / ranks.run_on_rank_0(write_mark)
    # A network file system may remember for a minute that the folder was missing.
    deadline = time.monotonic() + _SECONDS_TO_SEE
    while not mark.exists() and time.monotonic() < deadline:
        sign_of_life()
        time.sleep(0.1)
    is_missing = ranks.any(not mark.exists())  # every rank has looked, so the mark can be deleted
    if ranks.rank == 0:
        mark.unlink(missing_ok=True)
    if is_missing:
        raise CacheError(
            f"teacher_cache: not all machines see what the first one writes to {folder}: set it to a folder that they "
            "share."
        )


def _without_row_number(document: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key != "row"}


def _compute_missing(
    loader: BatchLoader,
    cache: TeacherCache,
    rows: np.ndarray,
    collate: Callable[[list[Any]], Batch],
    likeliest: Likeliest,
    first_position: int,
    dims: ParallelDims,
) -> None:
    """Compute and write ``rows``, which are split among the ranks; the first rank writes."""
    writing = cache.writing(rows) if dims.is_main else nullcontext()
    with writing as write:
        for batch in uncached_batches(loader, rows, collate, "Teacher", dims):
            is_labeled = batch.labels != CROSS_ENTROPY_IGNORE_IDX
            positions = batch.per_token[CACHE_POSITIONS][is_labeled].numpy() - first_position  # [n], in this cache
            tokens, log_probs = likeliest(batch).arrays()
            local_values = (
                positions,
                tokens.cpu().numpy().astype(np.int32),
                log_probs.cpu().numpy().astype(np.float32),
            )
            # All ranks take part in the collective, although only the first one writes.
            for rank_values in dims.gather(local_values):
                if dims.is_main:
                    write(*rank_values)
    dims.any(False)  # barrier: all ranks must have written before one reads
    cache.reload()
