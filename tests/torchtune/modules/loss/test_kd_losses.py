"""Divergences between student and teacher equal their definitions."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtune.modules.loss import (
    ForwardKLLoss,
    ForwardKLWithChunkedOutputLoss,
    ReverseKLLoss,
    ReverseKLWithChunkedOutputLoss,
    SymmetricKLLoss,
    SymmetricKLWithChunkedOutputLoss,
)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    student = torch.randn(2, 12, 19, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 19, (2, 12))
    labels[:, :5] = -100
    return student, torch.randn(2, 12, 19, dtype=torch.float64), labels


def kl(p: Tensor, q: Tensor, labels: Tensor) -> Tensor:
    """Mean KL(p‖q) over labelled positions, by torch."""
    rows = F.kl_div(q.log_softmax(-1), p.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    return rows[labels != -100].mean()


PAIRS = [
    (ForwardKLLoss(), ForwardKLWithChunkedOutputLoss(3), 1.0),
    (ReverseKLLoss(), ReverseKLWithChunkedOutputLoss(3), 0.0),
    (SymmetricKLLoss(0.3), SymmetricKLWithChunkedOutputLoss(3, sym_kd_ratio=0.3), 0.3),
]


@pytest.mark.parametrize(("loss", "chunked", "ratio"), PAIRS)
def test_definition_and_gradient(loss: nn.Module, chunked: nn.Module, ratio: float) -> None:
    student, teacher, labels = inputs()
    exact = ratio * kl(teacher, student, labels) + (1 - ratio) * kl(student, teacher, labels)
    (grad,) = torch.autograd.grad(exact, student)
    value = loss(student, teacher, labels)
    torch.testing.assert_close(value, exact)
    torch.testing.assert_close(torch.autograd.grad(value, student)[0], grad)
    flat = loss(student.flatten(0, 1), teacher.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(flat, exact)
    total = loss(student, teacher, labels, normalize=False)
    torch.testing.assert_close(total, exact * (labels != -100).sum())
    for chunks in (3, 5):
        parts = chunked(student.chunk(chunks, dim=1), teacher.chunk(chunks, dim=1), labels)
        torch.testing.assert_close(parts, exact)


@pytest.mark.parametrize(("loss", "chunked", "ratio"), PAIRS)
def test_equal_models_no_labels_and_excluded_tokens(loss: nn.Module, chunked: nn.Module, ratio: float) -> None:
    student, teacher, labels = inputs()
    assert loss(student, student.detach(), labels).abs() <= 1e-12
    nothing = torch.full_like(labels, -100)
    assert loss(student, teacher, nothing) == 0
    assert chunked(student.chunk(3, dim=1), teacher.chunk(3, dim=1), nothing) == 0
    excluded = torch.zeros(19, dtype=torch.float64)
    excluded[-2:] = -torch.inf  # entries of a padded vocabulary
    value = loss(student + excluded, teacher + excluded, labels)
    torch.testing.assert_close(value, loss(student[..., :-2], teacher[..., :-2], labels))
    assert torch.autograd.grad(value, student)[0].isfinite().all()


def test_bf16_logits_are_computed_in_float32() -> None:
    student, teacher, labels = (tensor.detach() for tensor in inputs())
    value = ForwardKLLoss()(student.bfloat16(), teacher.bfloat16(), labels)
    assert value.dtype == torch.float32
    exact = ForwardKLLoss()(student.bfloat16().double(), teacher.bfloat16().double(), labels)
    assert abs(value - exact) <= 1e-6


def test_compiled() -> None:
    student, teacher, labels = (tensor.detach() for tensor in inputs())
    loss = ForwardKLWithChunkedOutputLoss(3)
    exact = loss(student.chunk(3, dim=1), teacher.chunk(3, dim=1), labels)
    assert loss.apply_compile_strategy(backend="aot_eager") is loss
    torch.testing.assert_close(loss(student.chunk(3, dim=1), teacher.chunk(3, dim=1), labels), exact)


def test_mistakes() -> None:
    student, teacher, labels = inputs()
    with pytest.raises(ValueError, match=r"cover 10 positions .* labels have 12"):
        ForwardKLWithChunkedOutputLoss(2)(student[:, :10].chunk(2, 1), teacher[:, :10].chunk(2, 1), labels)
    with pytest.raises(ValueError, match=r"sym_kd_ratio is 1\.5"):
        SymmetricKLLoss(1.5)
    with pytest.raises(ValueError, match="num_output_chunks is 0"):
        ReverseKLWithChunkedOutputLoss(0)
