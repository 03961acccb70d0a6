"""The teacher of a distillation: another model, frozen, that sees the batches of the student."""

import json
import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from torchtune import config
from torchtune.data import Batch, BatchLoader
from torchtune.modules.loss import LikeliestTokens, LossError, TeacherOutputs, TeacherStates
from torchtune.rlhf._teacher_cache import AT, CachedOutputs, TeacherCache, use_cache
from torchtune.training import ParallelDims, compile_loss, compile_model, fit_vocabulary
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


class DistillationRecipe(Protocol):
    """What :func:`setup_teacher` reads of a recipe."""

    cfg: Any  # has compile, epochs, dtype and teacher_model
    checkpointer: Any
    tokenizer: Any
    kd_loss_fn: Any
    loader: BatchLoader
    loader_val: BatchLoader | None
    dims: ParallelDims


def setup_teacher(
    recipe: DistillationRecipe, student: nn.Module, load: Callable[[], nn.Module], teacher_cache: str | None = None
) -> "Teacher | CachedTeacher":
    """Load the teacher of a run, before its first step.

    With a cache it is loaded only to compute what the folder does not have yet, and then let go.

    Args:
        recipe: has a checkpointer with the sources ``policy`` and ``teacher``, the tokenizer of its data and, for a
            cache, its data, its processes and ``kd_loss_fn``.
        student: the model that is trained.
        load: returns the teacher.
        teacher_cache: folder of what the teacher finds likeliest; None runs it in every step.

    Raises:
        UserError: the two have different tokenizers, one has fewer tokens than the data may have, or the cache is of
            another run.
    """
    other, own = (recipe.checkpointer.store.source(name) for name in ("teacher", "policy"))
    check_same_tokenizer(Path(other.checkpoint_dir), Path(own.checkpoint_dir))
    warn_of_itself(other, own, "teacher_checkpointer")
    fit_vocabulary(student, recipe.tokenizer)
    if teacher_cache is None:
        teacher = _load(recipe, student, load)
        size = min(len(model.tok_embeddings.weight) for model in (teacher, student))
        _check_top_k(getattr(recipe.kd_loss_fn, "top_k", None), size)
        return Teacher(teacher)
    return _setup_cache(recipe, student, load, Path(teacher_cache))


def _check_top_k(k: int | None, size: int) -> None:
    if k is not None and k >= size:
        raise TeacherError(f"kd_loss.top_k is {k}: it must be below the {size:,} tokens that both models have.")


def _load(recipe: DistillationRecipe, student: nn.Module, load: Callable[[], nn.Module]) -> nn.Module:
    teacher = load()
    theirs, mine = (len(model.tok_embeddings.weight) for model in (teacher, student))
    if theirs < recipe.tokenizer.vocab_size:
        raise TeacherError(
            f"teacher_model: it knows {theirs:,} tokens and the tokenizer has {recipe.tokenizer.vocab_size:,}: take a "
            "teacher that knows all tokens of the data."
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
    if recipe.cfg.compile:
        compile_model(teacher)
    return teacher


def _setup_cache(
    recipe: DistillationRecipe, student: nn.Module, load: Callable[[], nn.Module], folder: Path
) -> CachedTeacher:
    cfg, loss = recipe.cfg, recipe.kd_loss_fn
    k = getattr(loss, "top_k", None)
    if k is None:
        raise TeacherError("teacher_cache: it keeps a teacher's likeliest tokens: set kd_loss.top_k, such as 64.")
    with torch.device("meta"):
        described = config.instantiate(cfg.teacher_model)
    size = min(len(described.tok_embeddings.weight), len(student.tok_embeddings.weight))
    _check_top_k(k, size)
    key = {
        "teacher": recipe.checkpointer.store.source("teacher").fingerprint,
        "teacher_model": zlib.crc32(repr(getattr(described, "description", None)).encode()),
        "dtype": cfg.dtype,
        "vocabulary": size,
        "kd_loss.top_k": k,
        "kd_loss.temperature": loss.temperature,
    }
    loaders = {"train": recipe.loader, "val": recipe.loader_val}
    loaders = {name: loader for name, loader in loaders.items() if loader is not None}
    caches, start = [], 0
    for name, loader in loaders.items():
        caches.append((start, TeacherCache(folder / name, loader.dataset, key, k)))
        start += int(caches[-1][1].offsets[-1])
    models: list[Teacher] = []

    @torch.no_grad()
    def likeliest(batch: Batch) -> LikeliestTokens:
        if not models:
            models.append(Teacher(_load(recipe, student, load)))
        batch = batch.to(next(models[0].model.parameters()).device)
        with models[0](batch) as found:
            return loss.likeliest(batch.labels, found, size)

    for loader, (first, cache) in zip(loaders.values(), caches, strict=True):
        use_cache(loader, cache, likeliest, start=first, epochs=cfg.epochs, dims=recipe.dims)
    models.clear()
    return CachedTeacher(caches, size, loss.temperature)


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
