"""Frozen teacher of knowledge distillation, and the checks that teacher and student have the same tokens."""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, Batch
from torchtune.modules.loss import LossError, TeacherOutputs, TeacherStates
from torchtune.tokenizers import explain_unknown_tokens
from torchtune.training import compile_loss, compile_model
from torchtune.training.parallel import reshard
from torchtune.utils import UserError, get_logger, log_rank_zero

# Files of a checkpoint that define its tokens.
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model", "original/tokenizer.model")


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
    if num_outputs < teacher_vocab_size:  # the output of a classifier or of a reward model
        raise TeacherError(
            f"teacher_model: a teacher predicts tokens, and this one ends in {num_outputs} output(s): take a language "
            "model, or the builder without 'classifier' or 'reward'."
        )
    # Models pad their vocabularies differently, so another size is no error.
    num_compared = min(teacher_vocab_size, student_vocab_size)
    if teacher_vocab_size != student_vocab_size:
        log_rank_zero(
            get_logger(),
            f"The teacher's vocabulary has {teacher_vocab_size:,} entries and the student's {student_vocab_size:,}: "
            f"the first {num_compared:,}, which both have, are compared.",
        )
    check_top_k(top_k_of(kd_loss), num_compared)
    if compile:
        compile_model(teacher)
    return Teacher(teacher)


def top_k_of(kd_loss: Any) -> int | None:
    """Return the number of the teacher's tokens that a loss compares; None for all, as of a user's loss without it."""
    return getattr(kd_loss, "top_k", None)


def check_top_k(top_k: int | None, num_compared: int) -> None:
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
    teacher_folder = Path(teacher.checkpoint_dir)
    check_same_tokenizer(teacher_folder, Path(student.checkpoint_dir))
    check_new_tokens(tokenizer, teacher_folder, "teacher_checkpointer", "teacher")
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
            f"kd_loss: {type(loss).__name__} does not compare two models: give a divergence of torchtune.modules.loss, "
            "such as ForwardKLWithChunkedOutputLoss, or a subclass of DivergenceLoss."
        )
    ignored_label = getattr(loss, "ignore_index", CROSS_ENTROPY_IGNORE_IDX)
    if ignored_label != CROSS_ENTROPY_IGNORE_IDX:
        raise LossError(
            f"kd_loss: it ignores the label {ignored_label}, but {CROSS_ENTROPY_IGNORE_IDX} marks positions without "
            "one: leave out ignore_index."
        )
    if compile:
        return compile_loss(loss)
    return loss


def check_same_tokenizer(teacher: Path, student: Path, setting: str = "teacher_checkpointer") -> None:
    """Check that two checkpoint folders have the same tokens by id; added (special) tokens may differ.

    Args:
        teacher: folder of the teacher's checkpoint.
        student: folder of the student's checkpoint.
        setting: name of the setting with the teacher's checkpoint, for the error message.

    Raises:
        TeacherError: the tokenizers differ.
    """
    in_both = []
    for name in _TOKENIZER_FILES:
        if (teacher / name).is_file() and (student / name).is_file():
            in_both.append(name)
    if not in_both:
        message = f"No tokenizer file is in both {teacher} and {student}: make sure that the two have one tokenizer."
        log_rank_zero(get_logger(), message)
        return
    # One kind of file in both folders, because different kinds write the same tokens differently.
    teacher_file = teacher / in_both[0]
    student_file = student / in_both[0]
    teacher_tokens = _read_vocabulary(teacher_file)
    student_tokens = _read_vocabulary(student_file)
    # Ids that only one of them has are of added tokens or of a longer vocabulary.
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
        TeacherError: the model does not know a new token.
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
    vocabulary = content  # vocab.json
    if "model" in content:  # tokenizer.json
        vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, list):  # Unigram: tokens with scores
        return {token_id: token for token_id, (token, _) in enumerate(vocabulary)}
    return {token_id: token for token, token_id in vocabulary.items()}
