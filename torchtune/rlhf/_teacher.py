"""Frozen teacher of knowledge distillation, and the cache of its most likely tokens."""

import dataclasses
import functools
import json
import logging
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from torchtune import config
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, Batch, BatchLoader, DataError
from torchtune.modules.loss import LikeliestTokens, LossError, TeacherOutputs, TeacherStates
from torchtune.rlhf._row_cache import CacheError, WithRowNumbers, create_folder, uncached_batches
from torchtune.supervision import StepPlan
from torchtune.tokenizers import explain_unknown_tokens
from torchtune.training import ParallelDims, compile_loss, compile_model
from torchtune.training.parallel import reshard
from torchtune.utils import FolderLock, UserError, atomic_write, get_logger, log_rank_zero, sign_of_life, write_json

# Files of a checkpoint that define its tokens.
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model", "original/tokenizer.model")

# Name of the per-token entry with positions in the cache.
CACHE_POSITIONS = "teacher_at"

# Files of a cache: what it was computed from; offsets, checksums and flags of the rows; tokens ``[n, k]`` and
# log-probs ``[n, k + 1]`` of all labeled positions, as plain arrays of 4-byte values.
_KEY_FILE = "teacher.json"
_ROWS_FILE = "rows.npz"
_TOKENS_FILE = "tokens.int32"
_LOG_PROBS_FILE = "log_probs.float32"
_VALUE_BYTES = 4

# Function that returns the teacher's most likely tokens at the labels of a batch.
Likeliest = Callable[[Batch], LikeliestTokens]


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
    teacher_vocab_size = len(teacher.tok_embeddings.weight)
    student_vocab_size = len(student.tok_embeddings.weight)
    if teacher_vocab_size < tokenizer.vocab_size:
        raise TeacherError(
            f"teacher_model: it knows {teacher_vocab_size:,} tokens and the tokenizer has {tokenizer.vocab_size:,}: "
            "take a teacher that knows all tokens of the data."
        )
    num_outputs = len(teacher.output.weight)
    if num_outputs < teacher_vocab_size:
        raise TeacherError(
            f"teacher_model: a teacher predicts tokens, and this one ends in {num_outputs} output(s): take a language "
            "model, or the builder without 'classifier' or 'reward'."
        )
    num_compared = min(teacher_vocab_size, student_vocab_size)
    if teacher_vocab_size != student_vocab_size:
        log_rank_zero(
            get_logger(),
            f"The teacher's vocabulary has {teacher_vocab_size:,} entries and the student's {student_vocab_size:,}: "
            f"the first {num_compared:,}, which both have, are compared.",
        )
    _check_top_k(_top_k(kd_loss), num_compared)
    if compile:
        compile_model(teacher)
    return Teacher(teacher)


def _top_k(kd_loss: Any) -> int | None:
    """Return the number of the teacher's tokens that a loss compares; None for all, as of a user's loss without it."""
    return getattr(kd_loss, "top_k", None)


def _check_top_k(top_k: int | None, num_compared: int) -> None:
    if top_k is not None and top_k >= num_compared:
        raise TeacherError(
            f"kd_loss.top_k is {top_k}: it must be below the {num_compared:,} tokens that both models have."
        )


def check_teacher(checkpointer: Any, tokenizer: Any = None) -> None:
    """Check that the teacher's checkpoint has the student's tokenizer, and warn if it has the same weights.

    Args:
        checkpointer: checkpointer of the run, with the sources ``policy`` and ``teacher``.
        tokenizer: tokenizer of the run, whose new tokens (``tokenizer.add_tokens``) the teacher must know.

    Raises:
        TeacherError: the tokenizers differ, or the teacher does not know a new token.

    Example:
        >>> rlhf.check_teacher(checkpointer)  # doctest: +SKIP
    """
    teacher = checkpointer.source("teacher")
    student = checkpointer.source("policy")
    check_same_tokenizer(Path(teacher.checkpoint_dir), Path(student.checkpoint_dir))
    check_new_tokens(tokenizer, Path(teacher.checkpoint_dir), "teacher_checkpointer", "teacher")
    warn_if_same_weights(teacher, student, "teacher_checkpointer")


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
    ignored_label = getattr(loss, "ignore_index", CROSS_ENTROPY_IGNORE_IDX)
    if ignored_label != CROSS_ENTROPY_IGNORE_IDX:
        raise LossError(
            f"kd_loss: it ignores the label {ignored_label}, but {CROSS_ENTROPY_IGNORE_IDX} marks positions without "
            "one: leave out ignore_index."
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
    in_both = [name for name in _TOKENIZER_FILES if (teacher / name).is_file() and (student / name).is_file()]
    if not in_both:
        message = f"No tokenizer file is in both {teacher} and {student}: make sure that the two have one tokenizer."
        log_rank_zero(get_logger(), message)
        return
    teacher_file = teacher / in_both[0]
    student_file = student / in_both[0]
    teacher_tokens = _read_vocabulary(teacher_file)
    student_tokens = _read_vocabulary(student_file)
    for token_id in sorted(teacher_tokens.keys() & student_tokens.keys()):
        if teacher_tokens[token_id] != student_tokens[token_id]:
            raise TeacherError(
                f"{setting}: token {token_id} is {teacher_tokens[token_id]!r} in {teacher_file} and "
                f"{student_tokens[token_id]!r} in {student_file}: models are compared by token ids, take one with the "
                "same tokenizer."
            )


def check_new_tokens(tokenizer: Any, folder: Path, setting: str, model: str) -> None:
    """Check that a frozen model, which learns nothing, knows the tokens that the config adds.

    Args:
        tokenizer: tokenizer of the run.
        folder: folder of the model's checkpoint.
        setting: name of the setting with this checkpoint, for the error message.
        model: what the model is, for the error message.

    Raises:
        TeacherError: it does not.
    """
    reason = explain_unknown_tokens(tokenizer, folder, model)
    if reason is not None:
        raise TeacherError(f"{setting}: {reason}")


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
    if path.suffix != ".json":
        lines = path.read_bytes().decode("latin-1").split("\n")
        return dict(enumerate(lines))
    content = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"] if "model" in content else content
    if isinstance(vocabulary, list):  # Unigram: tokens with scores
        return {token_id: token for token_id, (token, _) in enumerate(vocabulary)}
    return {token_id: token for token, token_id in vocabulary.items()}


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
    top_k = _top_k(kd_loss)
    if top_k is None:
        raise TeacherError("teacher_cache: it keeps a teacher's likeliest tokens: set kd_loss.top_k, such as 64.")
    with torch.device("meta"):  # sizes only: the weights are not needed if all tokens are cached
        teacher_model = config.instantiate(cfg.teacher_model)
    num_compared = min(len(teacher_model.tok_embeddings.weight), len(student.tok_embeddings.weight))
    _check_top_k(top_k, num_compared)
    description = getattr(teacher_model, "description", None)  # a user's model may lack it
    key = {
        "teacher": source.fingerprint,
        "teacher_model": zlib.crc32(repr(description).encode()),
        "dtype": cfg.dtype,
        "vocabulary": num_compared,
        "kd_loss.top_k": top_k,
        "kd_loss.temperature": kd_loss.temperature,
    }

    # Positions are unique among the caches: those of a cache begin where those of the cache before it end.
    names = ("train", "val")
    caches: dict[str, tuple[int, TeacherCache]] = {}
    num_positions = 0
    for name, loader in zip(names, loaders, strict=False):
        if loader is not None:
            cache = TeacherCache(Path(cfg.teacher_cache) / name, loader.dataset, key, top_k)
            caches[name] = (num_positions, cache)
            num_positions += int(cache.offsets[-1])

    load_once = functools.cache(load)

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
            use_cache(
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
        """Read some positions, int64 ``[n]``. Raises :class:`CacheError` if the batch does not match the cache."""
        positions = self._positions.flatten()[index].cpu().numpy()  # [n]
        if vocab_size != self.vocab_size or (positions < 0).any():
            raise CacheError("teacher_cache: a batch has labels or tokens that are not in it: set it to null.")
        # All rows of a batch are of one dataset, so its first position determines the cache. Without a position,
        # nothing is read, and any cache will do.
        first_position, cache = self._caches[-1]
        if len(positions):
            for start, candidate in self._caches:
                if start <= positions[0]:
                    first_position, cache = start, candidate
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
        # Through JSON, because it is compared with what was read from the file.
        self._key = json.loads(json.dumps({**key, "data (rows, template, masks)": [self._num_rows, data.fingerprint]}))
        self._files: tuple[np.ndarray, np.ndarray] | None = None  # tokens and log-probs, memory-mapped when read
        if (folder / _KEY_FILE).exists():
            self._check_key()
            self._read_rows()
        else:
            self._count_labels(data)

    def _count_labels(self, data: Any) -> None:
        """Count the labels of every row, for the offsets; no row is cached yet."""
        counts = np.zeros(self._num_rows, np.int64)
        self._row_checksums = np.zeros(self._num_rows, np.uint32)
        for row in tqdm(range(self._num_rows), desc="Counting labels", disable=None):
            sign_of_life()
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
            is_short = len(str(key[name])) < 20  # fingerprints tell a reader nothing
            changes.append(f"{name} (was {key[name]}, is {self._key[name]})" if is_short else name)
        raise CacheError(
            f"teacher_cache: {self.folder} was filled for a run that differs in {', '.join(changes)}: set it to a new "
            "folder, or delete this one."
        )

    def _read_rows(self) -> None:
        """Read what is known of the rows, and check that the files have the values of all cached rows."""
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
        num_positions = int(self.offsets[1:][self._is_cached].max(initial=0))  # the end of the last cached row
        if (
            len(self._is_cached) != self._num_rows
            or tokens_size < _VALUE_BYTES * num_positions * self._k
            or log_probs_size < _VALUE_BYTES * num_positions * (self._k + 1)
        ):
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
            count, checksum = _count_and_checksum(example)
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

            self._files = None  # they are longer now
            for row in rows:
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
            write_json(self.folder / _KEY_FILE, self._key)

    def reload(self) -> None:
        """Read the files again after another process has written them."""
        self._files = None
        self._read_rows()

    def read(self, positions: np.ndarray | slice) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens, int32 ``[n, k]``, and log-probs, float32 ``[n, k + 1]``, at positions ``[n]``."""
        if self._files is None:
            tokens = np.memmap(self.folder / _TOKENS_FILE, np.int32, "r").reshape(-1, self._k)
            log_probs = np.memmap(self.folder / _LOG_PROBS_FILE, np.float32, "r").reshape(-1, self._k + 1)
            self._files = (tokens, log_probs)
        tokens, log_probs = self._files
        return tokens[positions], log_probs[positions]


def _write_at(file: BinaryIO, positions: np.ndarray, values: np.ndarray) -> None:
    """Write values ``[n, width]`` of 4 bytes at their positions ``[n]``, adjacent positions in one write."""
    bytes_per_position = _VALUE_BYTES * values.shape[1]
    run_starts = np.flatnonzero(np.diff(positions) != 1) + 1
    for run in np.split(np.arange(len(positions)), run_starts):
        if len(run):
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


def use_cache(
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
    collate = ParallelDims.unsharded_collate(loader.collate_fn)

    def with_positions(numbered_examples: list[Any]) -> Batch:
        """Collate examples with row numbers; add the positions of their labels in the cache."""
        rows = []
        examples = []
        for numbered in numbered_examples:
            row, example = _split_row_number(numbered)
            rows.append(row)
            examples.append(example)
        cache.check_rows(rows, examples)
        batch = collate(examples)
        is_labeled = batch.labels != CROSS_ENTROPY_IGNORE_IDX
        positions = torch.full_like(batch.labels, -1)
        num_labels = int(is_labeled.sum())
        if num_labels:
            # The labels of a batch are in the order of its rows, and so are the values of a row in the cache.
            label_positions = torch.cat([torch.arange(cache.offsets[row], cache.offsets[row + 1]) for row in rows])
            if len(label_positions) != num_labels:
                raise DataError(
                    f"collate_fn: it makes {num_labels} labels of {len(label_positions)}, so nobody can tell which of "
                    "teacher_cache they are: use torchtune.data.collate_documents, or set teacher_cache to null."
                )
            positions[is_labeled] = label_positions + first_position
        return dataclasses.replace(batch, per_token={**batch.per_token, CACHE_POSITIONS: positions})

    sharded_collate = dims.collate(with_positions)
    missing = cache.missing(loader.visited_indices(epochs))
    if dims.any(len(missing) > 0):
        log_rank_zero(get_logger(), f"Running the teacher on {len(missing):,} rows, once: {cache.folder}")
        _compute_missing(loader, cache, missing, sharded_collate, likeliest, first_position, dims)
    return loader.derive(dataset=WithRowNumbers(loader.dataset), collate_fn=sharded_collate)


def _split_row_number(numbered: Any) -> tuple[int, Any]:
    """Return the row number of an example or pack, and the example without it."""
    if isinstance(numbered, Mapping):
        return numbered["row"], _without_row_number(numbered)
    return numbered[0]["row"], [_without_row_number(document) for document in numbered]


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
    with cache.writing(rows) if dims.is_main else nullcontext() as write:
        for batch in uncached_batches(loader, rows, collate, "Teacher", dims):
            is_labeled = batch.labels != CROSS_ENTROPY_IGNORE_IDX
            positions = batch.per_token[CACHE_POSITIONS][is_labeled].numpy() - first_position  # [n]
            tokens, log_probs = likeliest(batch).arrays()
            local_values = (
                positions,
                tokens.cpu().numpy().astype(np.int32),
                log_probs.cpu().numpy().astype(np.float32),
            )
            for rank_values in dims.gather(local_values):
                if dims.is_main:
                    write(*rank_values)
    dims.any(False)  # barrier: all ranks must have written before one reads
    cache.reload()
