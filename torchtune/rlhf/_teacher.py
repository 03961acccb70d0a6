"""The teacher of a distillation: another model, frozen, that sees the batches of the student."""

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
from torchtune.data import Batch, BatchLoader
from torchtune.modules.loss import LikeliestTokens, LossError, TeacherOutputs, TeacherStates
from torchtune.rlhf._teacher_cache import AT, CachedOutputs, TeacherCache, use_cache
from torchtune.training import ParallelDims, compile_loss, compile_model
from torchtune.training.parallel._shards import reshard
from torchtune.utils import UserError, get_logger, log_rank_zero

_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model", "original/tokenizer.model")


class TeacherError(UserError):
    """A teacher that a student cannot learn from."""

    told_by_rank_0 = True  # all ranks find the same


class Teacher:
    """A frozen model in evaluation mode; called with a batch, it tells what it says of it.

    Args:
        model: loaded, sharded or not; its parameters are frozen.

    Example:
        >>> torchtune.rlhf.Teacher(model)  # doctest: +ELLIPSIS
        <torchtune.rlhf...Teacher object at ...>
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model.requires_grad_(False).eval()

    @contextmanager
    def __call__(self, batch: Batch) -> Iterator[TeacherOutputs]:
        """What the teacher says of a batch on its device; the block computes the loss, not the backward pass."""
        with torch.no_grad():
            hidden = self.model(**batch.model_inputs(), output="hidden")
        yield TeacherStates(hidden, self.model.output)
        reshard(self.model)  # FSDP would keep embedding and output whole until the next batch


class CachedTeacher:
    """What a teacher said of the data, read from a folder; no model is in memory.

    Args:
        caches: ``(first position, cache)``, ascending.
        vocab_size: tokens over which the distributions are normalised.
        temperature: of them.
    """

    def __init__(self, caches: Sequence[tuple[int, TeacherCache]], vocab_size: int, temperature: float) -> None:
        self._caches, self._vocab_size, self._temperature = caches, vocab_size, temperature

    @contextmanager
    def __call__(self, batch: Batch) -> Iterator[TeacherOutputs]:
        """What the teacher says of a batch on its device; see :class:`Teacher`."""
        yield CachedOutputs(self._caches, batch.per_token[AT], self._vocab_size, self._temperature)


def _check_top_k(k: int | None, size: int) -> None:
    if k is not None and k >= size:
        raise TeacherError(f"kd_loss.top_k is {k}: it must be below the {size:,} tokens that both models have.")


def load_teacher(
    load: Callable[[], nn.Module], student: nn.Module, tokenizer: Any, kd_loss: Any, *, compile: bool = False
) -> Teacher:
    """Load the teacher of a run, and see that it knows what the student is to learn.

    Args:
        load: returns the teacher's model.
        student: the model that is trained.
        tokenizer: of the data.
        kd_loss: from :func:`setup_kd_loss`.
        compile: compile the teacher's layers.

    Raises:
        TeacherError: one has fewer tokens than the data may have, or the teacher predicts none.

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
    """What the teacher finds likeliest, from a folder; it is loaded to compute what is missing there, and let go.

    Args:
        loaders: of the training data and of the validation data, or None where there are none.
        load: returns the teacher, see :func:`load_teacher`.
        student: the model that is trained.
        kd_loss: has ``top_k``, the number of tokens that are kept.
        dims: the processes, which call this together.
        cfg: settings with ``teacher_model``, ``teacher_cache`` (the folder), ``dtype`` and ``epochs``.
        source: of the teacher's weights.

    Returns:
        loaders whose batches say where the folder has them, and the teacher for these batches.

    Raises:
        TeacherError: the loss keeps all tokens.
        UserError: the folder is of another run.

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
    """Compare the teacher's checkpoint with the student's: one tokenizer, other weights.

    Args:
        checkpointer: of the run, with the sources ``policy`` and ``teacher``.

    Raises:
        TeacherError: they have different tokenizers.

    Example:
        >>> rlhf.check_teacher(checkpointer)  # doctest: +SKIP
    """
    other, own = (checkpointer.store.source(name) for name in ("teacher", "policy"))
    check_same_tokenizer(Path(other.checkpoint_dir), Path(own.checkpoint_dir))
    warn_of_itself(other, own, "teacher_checkpointer")


def setup_kd_loss(loss: Any, *, compile: bool = False) -> Any:
    """Check that a recipe of distillation can train with a loss, and return it.

    Args:
        loss: has ``distill``, as every :class:`torchtune.modules.loss.DivergenceLoss`.
        compile: compile its divergence.

    Raises:
        LossError: it has none.
    """
    if not hasattr(loss, "distill"):
        raise LossError(
            f"kd_loss: {type(loss).__name__} compares no two models: give a divergence of torchtune.modules.loss, such "
            "as ForwardKLWithChunkedOutputLoss, or a subclass of DivergenceLoss."
        )
    return compile_loss(loss) if compile else loss


def check_same_tokenizer(teacher: Path, student: Path, setting: str = "teacher_checkpointer") -> None:
    """Compare the tokens of two checkpoint folders by their ids; added (special) tokens may differ.

    Args:
        teacher: a folder.
        student: the other one.
        setting: that names the first, for the message.

    Raises:
        TeacherError: they are not the same.
    """
    for name in _FILES:
        if (teacher / name).is_file() and (student / name).is_file():
            theirs, mine = _tokens(teacher / name), _tokens(student / name)
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


def warn_of_itself(teacher: Any, student: Any, setting: str) -> None:
    """Log that a teacher has the weights that the student begins with; sources of both."""
    if teacher.fingerprint == student.fingerprint:
        message = (
            f"{setting}: the teacher has the weights that the student begins with, so it teaches nothing but what "
            "model_converters change (quantised weights)."
        )
        log_rank_zero(get_logger(), message, logging.WARNING)


def _tokens(path: Path) -> dict[int, str]:
    """Id -> token, without added tokens; of a binary file or one of lines, id -> line."""
    if path.suffix == ".json":
        content = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = content["model"]["vocab"] if "model" in content else content
        if isinstance(vocabulary, list):  # Unigram: tokens with scores
            return {number: token for number, (token, _) in enumerate(vocabulary)}
        return {number: token for token, number in vocabulary.items()}
    return dict(enumerate(path.read_bytes().decode("latin-1").split("\n")))
