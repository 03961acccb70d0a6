"""The teacher of a distillation: another model, frozen, that sees the batches of the student."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from torchtune.data import Batch
from torchtune.modules.loss import LossError, TeacherOutputs, TeacherStates
from torchtune.training import compile_loss, compile_model, fit_vocabulary
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


class DistillationRecipe(Protocol):
    """What :func:`setup_teacher` reads of a recipe."""

    cfg: Any  # has compile
    checkpointer: Any
    tokenizer: Any


def setup_teacher(recipe: DistillationRecipe, student: nn.Module, load: Callable[[], nn.Module]) -> Teacher:
    """Load the teacher of a run, before its first step.

    Args:
        recipe: has a checkpointer with the sources ``policy`` and ``teacher``, and the tokenizer of its data.
        student: the model that is trained.
        load: returns the teacher.

    Raises:
        UserError: the two have different tokenizers, or one has fewer tokens than the data may have.
    """
    folder, of_student = (Path(recipe.checkpointer.store.source(n).checkpoint_dir) for n in ("teacher", "policy"))
    check_same_tokenizer(folder, of_student)
    fit_vocabulary(student, recipe.tokenizer)
    teacher = load()
    theirs, mine = (len(model.tok_embeddings.weight) for model in (teacher, student))
    if theirs < recipe.tokenizer.vocab_size:
        raise TeacherError(
            f"teacher_model: it knows {theirs:,} tokens and the tokenizer has {recipe.tokenizer.vocab_size:,}: take a "
            "teacher that knows all tokens of the data."
        )
    if theirs != mine:
        log_rank_zero(
            get_logger(),
            f"The teacher's vocabulary has {theirs:,} entries and the student's {mine:,}: the first "
            f"{min(theirs, mine):,}, which both have, are compared.",
        )
    if recipe.cfg.compile:
        compile_model(teacher)
    return Teacher(teacher)


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


def _tokens(path: Path) -> dict[int, str]:
    """Id -> token, without added tokens; of a binary file or one of lines, id -> line."""
    if path.suffix == ".json":
        content = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = content["model"]["vocab"] if "model" in content else content
        if isinstance(vocabulary, list):  # Unigram: tokens with scores
            return {number: token for number, (token, _) in enumerate(vocabulary)}
        return {number: token for token, number in vocabulary.items()}
    return dict(enumerate(path.read_bytes().decode("latin-1").split("\n")))
