"""Frozen teacher of knowledge distillation, and the cache of its most likely tokens."""

import dataclasses
import json
import logging
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from torchtune import config
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, Batch, BatchLoader, DataError
from torchtune.modules.loss import LikeliestTokens, LossError, TeacherOutputs, TeacherStates
from torchtune.rlhf._row_cache import CacheError, WithRowNumbers, create_folder, uncached_batches
from torchtune.training import ParallelDims, compile_loss, compile_model
from torchtune.training.parallel import reshard
from torchtune.utils import FolderLock, UserError, atomic_write, get_logger, log_rank_zero, sign_of_life, write_json

# Name of the per-token entry with positions in the cache.
CACHE_POSITIONS = "teacher_at"
_KEY, _ROWS, _TOKENS, _LOG_PROBS = "teacher.json", "rows.npz", "tokens.int32", "log_probs.float32"
Likeliest = Callable[[Batch], LikeliestTokens]


class TeacherCache:
    """Cache of one dataset in a folder; each row has an offset at which the values of its labeled tokens begin.

    Args:
        folder: folder of the files.
        data: dataset of documents or packs, with a ``fingerprint``.
        key: everything besides the data that the log-probs depend on, as JSON values by name.
        k: number of tokens per position.

    Raises:
        CacheError: the dataset has no fingerprint, the cache has other data or another key, or a file is damaged.
    """

    def __init__(self, folder: Path, data: Any, key: Mapping[str, Any], k: int) -> None:
        if data.fingerprint is None:
            raise CacheError(
                f"teacher_cache: {type(data).__name__} has no fingerprint, so its rows may change: set it to null."
            )
        self.folder, self._data, self._k = folder, data, k
        self._key = json.loads(json.dumps({**key, "data (rows, template, masks)": [len(data), data.fingerprint]}))
        self.exists = (folder / _KEY).exists()
        if self.exists:
            self._check_key()
            self._read_rows()
        else:
            counts = np.zeros(len(data), np.int64)
            self._row_checksums = np.zeros(len(data), np.uint32)
            for row in tqdm(range(len(data)), desc="Counting labels", disable=None):
                sign_of_life()
                counts[row], self._row_checksums[row] = _count_and_checksum(data[row])
            self.offsets = np.concatenate([np.zeros(1, np.int64), counts.cumsum()])
            self._is_cached, self._value_checksums = np.zeros(len(data), bool), np.zeros(len(data), np.uint32)
        self._files: tuple[np.ndarray, np.ndarray] | None = None

    def _check_key(self) -> None:
        path = self.folder / _KEY
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            changed = [name for name in self._key if found[name] != self._key[name]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CacheError(f"{path} is damaged ({error}): delete {self.folder}.") from error
        if changed:
            texts = {name: (str(found[name]), str(self._key[name])) for name in changed}
            shown = [f"{name} (was {was}, is {now})" if len(was) < 20 else name for name, (was, now) in texts.items()]
            raise CacheError(
                f"teacher_cache: {self.folder} was filled for a run that differs in {', '.join(shown)}: set it to a "
                "new folder, or delete this one."
            )

    def _read_rows(self) -> None:
        path, rows = self.folder / _ROWS, len(self._data)
        try:
            with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                names = ("offsets", "sums", "known", "contents")
                self.offsets, self._row_checksums, self._is_cached, self._value_checksums = (
                    file[name] for name in names
                )
            sizes = [(self.folder / name).stat().st_size for name in (_TOKENS, _LOG_PROBS)]
        except (OSError, ValueError, KeyError, EOFError, zlib.error, BadZipFile) as error:
            raise CacheError(f"{path}: it cannot be read ({error}): delete {self.folder}.") from error
        last = int(self.offsets[1:][self._is_cached].max(initial=0))
        if len(self._is_cached) != rows or sizes[0] < 4 * last * self._k or sizes[1] < 4 * last * (self._k + 1):
            raise CacheError(f"{self.folder}: its files are too short, so a part of it is lost: delete it.")

    def missing(self, rows: np.ndarray) -> np.ndarray:
        """Return the rows that are not cached yet."""
        return rows[~self._is_cached[rows]]

    def check_rows(self, rows: Sequence[int], examples: Sequence[Any]) -> None:
        """Check that examples and their cached values have not changed.

        Raises:
            DataError: an example has changed.
            CacheError: the cached values of an example are damaged.
        """
        for row, example in zip(rows, examples, strict=True):
            count, found = _count_and_checksum(example)
            if count and found != self._row_checksums[row]:
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
        if self.offsets[row] == self.offsets[row + 1]:
            return 0
        tokens, log_probs = self.read(slice(*self.offsets[row : row + 2]))
        return zlib.crc32(log_probs.tobytes(), zlib.crc32(tokens.tobytes()))

    @contextmanager
    def writing(self, rows: np.ndarray) -> Iterator[Callable[[np.ndarray, tuple[np.ndarray, np.ndarray]], None]]:
        """Context manager that yields a function to write cached values.

        The function takes positions ``[n]`` with their tokens ``[n, k]`` and log-probs ``[n, k + 1]``. The rows become
        valid when the context ends, so a killed run computes them again.
        """
        create_folder(self.folder, "teacher_cache")
        names = [self.folder / name for name in (_TOKENS, _LOG_PROBS)]
        with FolderLock(self.folder, key="teacher_cache").held():
            for path in names:
                path.touch()
            try:
                with open(names[0], "r+b") as tokens, open(names[1], "r+b") as log_probs:

                    def write(at: np.ndarray, arrays: tuple[np.ndarray, np.ndarray]) -> None:
                        for run in np.split(np.arange(len(at)), np.flatnonzero(np.diff(at) != 1) + 1):
                            for file, array in zip((tokens, log_probs), arrays, strict=True):
                                if len(run):
                                    file.seek(int(at[run[0]]) * 4 * array.shape[1])
                                    file.write(array[run].tobytes())

                    yield write
                    for file in (tokens, log_probs):
                        file.flush()
                        os.fsync(file.fileno())
            except OSError as error:
                raise CacheError(f"{self.folder}: it cannot be written to ({error}).") from error
            self._files = None
            for row in rows:
                self._value_checksums[row] = self._checksum_of(row)
            self._is_cached[rows] = True
            with atomic_write(self.folder / _ROWS) as file:
                arrays = {"offsets": self.offsets, "sums": self._row_checksums, "known": self._is_cached}
                np.savez(file, **arrays, contents=self._value_checksums)
            write_json(self.folder / _KEY, self._key)

    def reload(self) -> None:
        """Read the files again after another process has written them."""
        self._files = None
        self._read_rows()

    def read(self, at: np.ndarray | slice) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens, int32 ``[n, k]``, and log-probs, float32 ``[n, k + 1]``, at positions ``[n]``."""
        if self._files is None:
            kinds = ((_TOKENS, np.int32, self._k), (_LOG_PROBS, np.float32, self._k + 1))
            self._files = tuple(
                np.memmap(self.folder / name, dtype, "r").reshape(-1, width) for name, dtype, width in kinds
            )
        return self._files[0][at], self._files[1][at]


def _split_row_numbers(examples: Sequence[Any]) -> tuple[list[int], list[Any]]:
    """Return the row numbers, and the examples without row numbers."""
    rows = [(one if isinstance(one, Mapping) else one[0])["row"] for one in examples]

    def plain(document: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in document.items() if key != "row"}

    return rows, [plain(one) if isinstance(one, Mapping) else [plain(document) for document in one] for one in examples]


def use_cache(
    loader: BatchLoader,
    cache: TeacherCache,
    likeliest: Likeliest | None,
    *,
    start: int,
    epochs: int,
    dims: ParallelDims,
) -> BatchLoader:
    """Compute the missing rows, and return a loader that adds cache positions to its batches.

    Args:
        loader: loader of the data.
        cache: cache of the loader's dataset.
        likeliest: function that returns the teacher's most likely tokens at the labels of a batch.
        start: offset of the positions, which makes them unique among several caches.
        epochs: number of epochs of the run; rows that are not visited in these epochs are skipped.
        dims: parallel dims; all ranks must call this function.
    """
    collate = getattr(loader.collate_fn, "unsplit", loader.collate_fn)

    def with_positions(examples: list[Any]) -> Batch:
        rows, plain = _split_row_numbers(examples)
        cache.check_rows(rows, plain)
        batch = collate(plain)
        labelled = batch.labels != CROSS_ENTROPY_IGNORE_IDX
        at = torch.full_like(batch.labels, -1)
        if count := int(labelled.sum()):
            found = torch.cat([torch.arange(cache.offsets[row], cache.offsets[row + 1]) for row in rows])
            if len(found) != count:
                raise DataError(
                    f"collate_fn: it makes {count} labels of {len(found)}, so nobody can tell which of teacher_cache "
                    "they are: use torchtune.data.collate_documents, or set teacher_cache to null."
                )
            at[labelled] = found + start
        return dataclasses.replace(batch, per_token={**batch.per_token, CACHE_POSITIONS: at})

    missing = cache.missing(loader.visited_indices(epochs))
    if dims.any(len(missing) > 0):
        log_rank_zero(get_logger(), f"Running the teacher on {len(missing):,} rows, once: {cache.folder}")
        _compute_missing(loader, cache, missing, dims.collate(with_positions), likeliest, start, dims)
    return loader.derive(dataset=WithRowNumbers(loader.dataset), collate_fn=dims.collate(with_positions))


def _compute_missing(
    loader: BatchLoader,
    cache: TeacherCache,
    rows: np.ndarray,
    collate: Callable[[list[Any]], Batch],
    likeliest: Likeliest,
    start: int,
    dims: ParallelDims,
) -> None:
    """Compute and write ``rows``, which are split among the ranks."""
    with cache.writing(rows) if dims.is_main else nullcontext() as write:
        for batch in uncached_batches(loader, rows, collate, "Teacher", dims):
            at = (
                batch.per_token[CACHE_POSITIONS].flatten()[(batch.labels != CROSS_ENTROPY_IGNORE_IDX).flatten()].numpy()
                - start
            )
            tokens, log_probs = (array.cpu().numpy() for array in likeliest(batch).arrays())
            for part in dims.gather((at, (tokens.astype(np.int32), log_probs.astype(np.float32)))):
                if dims.is_main:
                    write(*part)
    dims.any(False)  # barrier: all ranks must have written before one reads
    cache.reload()


def _count_and_checksum(example: Any) -> tuple[int, int]:
    """Return the number of labels of an example or pack, and a checksum of its tokens and labels."""
    count, found = 0, 0
    for document in [example] if isinstance(example, Mapping) else example:
        tokens, labels = (np.asarray(document[name], dtype=np.int64) for name in ("tokens", "labels"))
        count += int((labels != CROSS_ENTROPY_IGNORE_IDX).sum())
        found = zlib.crc32(labels.tobytes(), zlib.crc32(tokens.tobytes(), found))
    return count, found


class CachedOutputs:
    """Cached outputs at the positions of a batch; see :class:`torchtune.modules.loss.TeacherOutputs`.

    Args:
        caches: ``(first position, cache)``, ascending.
        at: positions, int64 ``[b, s]``.
        vocab_size: number of tokens in the normalization of the distributions.
        temperature: temperature of the distributions.
    """

    are_likeliest = True

    def __init__(
        self, caches: Sequence[tuple[int, TeacherCache]], at: Tensor, vocab_size: int, temperature: float
    ) -> None:
        self._caches, self._at, self.vocab_size, self._temperature = caches, at, vocab_size, temperature

    def select(self, index: Tensor, vocab_size: int) -> LikeliestTokens:
        """Read some positions, int64 ``[n]``. Raises :class:`CacheError` if the batch does not match the cache."""
        at = self._at.flatten()[index].cpu().numpy()
        if vocab_size != self.vocab_size or (at < 0).any():
            raise CacheError("teacher_cache: a batch has labels or tokens that are not in it: set it to null.")
        start, cache = next(one for one in reversed(self._caches) if not len(at) or one[0] <= at[0])
        tokens, log_probs = (torch.from_numpy(array).to(index.device) for array in cache.read(at - start))
        return LikeliestTokens(tokens.long(), log_probs, vocab_size, self._temperature)


_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model", "original/tokenizer.model")


class TeacherError(UserError):
    """Raised if the teacher does not fit the student."""

    raised_on_all = True


class Teacher:
    """Frozen teacher in evaluation mode; a call with a batch yields the teacher's outputs.

    Args:
        model: the loaded model, sharded or not; its parameters are frozen.

    Example:
        >>> torchtune.rlhf.Teacher(model)  # doctest: +ELLIPSIS
        <torchtune.rlhf...Teacher object at ...>
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model.requires_grad_(False).eval()

    @contextmanager
    def __call__(self, batch: Batch) -> Iterator[TeacherOutputs]:
        """Context manager that yields the teacher's outputs for a batch on the model's device.

        Run the backward pass after leaving it.
        """
        with torch.no_grad():
            hidden = self.model(**batch.model_inputs(), output="hidden")
        yield TeacherStates(hidden, self.model.output)
        reshard(self.model)  # otherwise FSDP keeps the embedding and the output unsharded until the next batch


class CachedTeacher:
    """Teacher outputs read from a cache, without a model in memory.

    Args:
        caches: ``(first position, cache)``, ascending.
        vocab_size: number of tokens in the normalization of the distributions.
        temperature: temperature of the distributions.
    """

    def __init__(self, caches: Sequence[tuple[int, TeacherCache]], vocab_size: int, temperature: float) -> None:
        self._caches, self._vocab_size, self._temperature = caches, vocab_size, temperature

    @contextmanager
    def __call__(self, batch: Batch) -> Iterator[TeacherOutputs]:
        """Context manager that yields the cached outputs for a batch; see :class:`Teacher`."""
        yield CachedOutputs(self._caches, batch.per_token[CACHE_POSITIONS], self._vocab_size, self._temperature)


def _check_top_k(k: int | None, size: int) -> None:
    if k is not None and k >= size:
        raise TeacherError(f"kd_loss.top_k is {k}: it must be below the {size:,} tokens that both models have.")


def load_teacher(
    load: Callable[[], nn.Module], student: nn.Module, tokenizer: Any, kd_loss: Any, *, compile: bool = False
) -> Teacher:
    """Load the teacher, and check that it fits the student.

    Args:
        load: function that returns the teacher's model.
        student: the trained model.
        tokenizer: tokenizer of the data.
        kd_loss: loss from :func:`setup_kd_loss`.
        compile: whether to compile the teacher's layers.

    Raises:
        TeacherError: the teacher is not a language model, or its vocabulary is smaller than the tokenizer's.

    Example:
        >>> teacher = rlhf.load_teacher(load, model, tokenizer, kd_loss)  # doctest: +SKIP
    """
    teacher = load()
    theirs, mine = (len(model.tok_embeddings.weight) for model in (teacher, student))
    if theirs < tokenizer.vocab_size:
        raise TeacherError(
            f"teacher_model: it knows {theirs:,} tokens and the tokenizer has {tokenizer.vocab_size:,}: take a teacher "
            "that knows all tokens of the data."
        )
    rows = len(teacher.output.weight)
    if rows < theirs:
        raise TeacherError(
            f"teacher_model: a teacher predicts tokens, and this one ends in {rows} output(s): take a language model, "
            "or the builder without 'classifier' or 'reward'."
        )
    if theirs != mine:
        log_rank_zero(
            get_logger(),
            f"The teacher's vocabulary has {theirs:,} entries and the student's {mine:,}: the first "
            f"{min(theirs, mine):,}, which both have, are compared.",
        )
    _check_top_k(getattr(kd_loss, "top_k", None), min(theirs, mine))
    if compile:
        compile_model(teacher)
    return Teacher(teacher)


def cache_teacher(
    loaders: Sequence[BatchLoader | None],
    load: Callable[[], Teacher],
    student: nn.Module,
    kd_loss: Any,
    dims: ParallelDims,
    *,
    cfg: Any,
    source: Any,
) -> tuple[list[BatchLoader | None], CachedTeacher]:
    """Cache the teacher's most likely tokens in a folder; the teacher is loaded only if tokens are missing.

    Args:
        loaders: loaders of the training and validation data; None stays None.
        load: function that returns the teacher, see :func:`load_teacher`.
        student: the trained model.
        kd_loss: loss with ``top_k``, the number of tokens to cache per position.
        dims: parallel dims; all ranks must call this function.
        cfg: settings with ``teacher_model``, ``teacher_cache`` (the folder), ``dtype`` and ``epochs``.
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
    k, folder = getattr(kd_loss, "top_k", None), Path(cfg.teacher_cache)
    if k is None:
        raise TeacherError("teacher_cache: it keeps a teacher's likeliest tokens: set kd_loss.top_k, such as 64.")
    with torch.device("meta"):
        described = config.instantiate(cfg.teacher_model)
    size = min(len(described.tok_embeddings.weight), len(student.tok_embeddings.weight))
    _check_top_k(k, size)
    key = {
        "teacher": source.fingerprint,
        "teacher_model": zlib.crc32(repr(getattr(described, "description", None)).encode()),
        "dtype": cfg.dtype,
        "vocabulary": size,
        "kd_loss.top_k": k,
        "kd_loss.temperature": kd_loss.temperature,
    }
    caches, start = [], 0
    given = [loader for loader in loaders if loader is not None]
    for name, loader in zip(("train", "val"), given, strict=False):
        caches.append((start, TeacherCache(folder / name, loader.dataset, key, k)))
        start += int(caches[-1][1].offsets[-1])
    teachers: list[Teacher] = []

    @torch.no_grad()
    def likeliest(batch: Batch) -> LikeliestTokens:
        if not teachers:
            teachers.append(load())
        batch = batch.to(next(teachers[0].model.parameters()).device)
        with teachers[0](batch) as found:
            return kd_loss.likeliest(batch.labels, found, size)

    found = [
        use_cache(loader, cache, likeliest, start=first, epochs=cfg.epochs, dims=dims)
        for loader, (first, cache) in zip(given, caches, strict=True)
    ]
    teachers.clear()
    return [None if loader is None else found.pop(0) for loader in loaders], CachedTeacher(
        caches, size, kd_loss.temperature
    )


def check_teacher(checkpointer: Any) -> None:
    """Check that the teacher's checkpoint has the student's tokenizer, and warn if it has the same weights.

    Args:
        checkpointer: checkpointer of the run, with the sources ``policy`` and ``teacher``.

    Raises:
        TeacherError: the tokenizers differ.

    Example:
        >>> rlhf.check_teacher(checkpointer)  # doctest: +SKIP
    """
    other, own = (checkpointer.store.source(name) for name in ("teacher", "policy"))
    check_same_tokenizer(Path(other.checkpoint_dir), Path(own.checkpoint_dir))
    warn_if_same_weights(other, own, "teacher_checkpointer")


def setup_kd_loss(loss: Any, *, compile: bool = False) -> Any:
    """Check that a loss can be used for distillation, and return the loss.

    Args:
        loss: loss with a method ``distill``, such as any :class:`torchtune.modules.loss.DivergenceLoss`.
        compile: whether to compile the divergence of the loss.

    Raises:
        LossError: the loss has no ``distill``, or ignores another label than -100.
    """
    if not hasattr(loss, "distill"):
        raise LossError(
            f"kd_loss: {type(loss).__name__} compares no two models: give a divergence of torchtune.modules.loss, such "
            "as ForwardKLWithChunkedOutputLoss, or a subclass of DivergenceLoss."
        )
    if (ignored := getattr(loss, "ignore_index", CROSS_ENTROPY_IGNORE_IDX)) != CROSS_ENTROPY_IGNORE_IDX:
        raise LossError(
            f"kd_loss: it ignores the label {ignored}, but {CROSS_ENTROPY_IGNORE_IDX} marks positions without one: "
            "leave out ignore_index."
        )
    return compile_loss(loss) if compile else loss


def check_same_tokenizer(teacher: Path, student: Path, setting: str = "teacher_checkpointer") -> None:
    """Check that two checkpoint folders have the same tokens by id; added (special) tokens may differ.

    Args:
        teacher: folder of the teacher's checkpoint.
        student: folder of the student's checkpoint.
        setting: name of the setting with the teacher's checkpoint, for the error message.

    Raises:
        TeacherError: the tokenizers differ.
    """
    for name in _FILES:
        if (teacher / name).is_file() and (student / name).is_file():
            theirs, mine = _read_vocabulary(teacher / name), _read_vocabulary(student / name)
            break
    else:
        message = f"No tokenizer file is in both {teacher} and {student}: make sure that the two have one tokenizer."
        return log_rank_zero(get_logger(), message)
    number = next((number for number in sorted(theirs.keys() & mine.keys()) if theirs[number] != mine[number]), None)
    if number is not None:
        raise TeacherError(
            f"{setting}: token {number} is {theirs[number]!r} in {teacher / name} and {mine[number]!r} in "
            f"{student / name}: models are compared by token ids, take one with the same tokenizer."
        )
    return None


def warn_if_same_weights(teacher: Any, student: Any, setting: str) -> None:
    """Warn if the sources of teacher and student have the same weights."""
    if teacher.fingerprint == student.fingerprint:
        message = (
            f"{setting}: the teacher has the weights that the student begins with, so it teaches nothing but what "
            "model_converters change (quantized weights)."
        )
        log_rank_zero(get_logger(), message, logging.WARNING)


def _read_vocabulary(path: Path) -> dict[int, str]:
    """Return a mapping from id to token, without added tokens; for text files and binary files, from id to line."""
    if path.suffix == ".json":
        content = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = content["model"]["vocab"] if "model" in content else content
        if isinstance(vocabulary, list):  # Unigram: tokens with scores
            return {number: token for number, (token, _) in enumerate(vocabulary)}
        return {number: token for token, number in vocabulary.items()}
    return dict(enumerate(path.read_bytes().decode("latin-1").split("\n")))
