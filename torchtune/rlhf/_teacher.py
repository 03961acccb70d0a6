"""Teacher of knowledge distillation: a frozen model that receives the student's batches."""

import json
import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchtune import config
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, Batch, BatchLoader
from torchtune.modules.loss import LikeliestTokens, LossError, TeacherOutputs, TeacherStates
from torchtune.rlhf._teacher_cache import CACHE_POSITIONS, CachedOutputs, TeacherCache, use_cache
from torchtune.training import ParallelDims, compile_loss, compile_model
from torchtune.training.parallel import reshard
from torchtune.utils import UserError, get_logger, log_rank_zero

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
