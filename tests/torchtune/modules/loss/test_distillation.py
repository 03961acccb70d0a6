"""Divergences between student and teacher equal their definitions, of logits and of hidden states."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtune.modules.loss import (
    ForwardKLLoss,
    ForwardKLWithChunkedOutputLoss,
    GeneralizedJSDLoss,
    ReverseKLLoss,
    ReverseKLWithChunkedOutputLoss,
    SymmetricKLLoss,
    SymmetricKLWithChunkedOutputLoss,
    TeacherStates,
)
from torchtune.modules.loss import distillation as kd_losses_module
from torchtune.modules.output_projection import CappedLinear


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    student = torch.randn(2, 12, 19, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 19, (2, 12))
    labels[:, :5] = -100
    return student, torch.randn(2, 12, 19, dtype=torch.float64), labels


def kl(p: Tensor, q: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Mean KL(p‖q) over labeled positions, by torch."""
    log_p, log_q = (logits.div(temperature).log_softmax(-1) for logits in (p, q))
    return F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)[labels != -100].mean()


def entropy(p: Tensor, labels: Tensor) -> Tensor:
    """Mean entropy over labeled positions."""
    return torch.distributions.Categorical(logits=p).entropy()[labels != -100].mean()


def mixture(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    return (beta * teacher.softmax(-1) + (1 - beta) * student.softmax(-1)).log()


def jsd(student: Tensor, teacher: Tensor, labels: Tensor, beta: float) -> Tensor:
    middle = mixture(student, teacher, beta)
    return beta * kl(teacher, middle, labels) + (1 - beta) * kl(student, middle, labels)


# (loss, the same in chunks, its definition of student, teacher and labels)
FORWARD = {"with_entropy": True, "temperature": 2.0}
SYMMETRIC = {"sym_kd_ratio": 0.3}
CASES = [
    (ForwardKLLoss(), ForwardKLWithChunkedOutputLoss(3), lambda s, t, y: kl(t, s, y) + entropy(t, y)),
    (ForwardKLLoss(**FORWARD), ForwardKLWithChunkedOutputLoss(3, **FORWARD), lambda s, t, y: kl(t, s, y, 2.0)),
    (ReverseKLLoss(), ReverseKLWithChunkedOutputLoss(3), lambda s, t, y: kl(s, t, y)),
    (
        SymmetricKLLoss(**SYMMETRIC),
        SymmetricKLWithChunkedOutputLoss(3, **SYMMETRIC),
        lambda s, t, y: 0.3 * (kl(t, s, y) + entropy(t, y)) + 0.7 * kl(s, t, y),
    ),
    (GeneralizedJSDLoss(0.2), None, lambda s, t, y: jsd(s, t, y, 0.2)),
    (GeneralizedJSDLoss(0.0), None, lambda s, t, y: kl(t, s, y)),
    (GeneralizedJSDLoss(1.0), None, lambda s, t, y: kl(s, t, y)),
]


@pytest.mark.parametrize(("loss", "chunked", "definition"), CASES)
def test_divergence_and_gradient_equal_their_definition(loss, chunked, definition):
    student, teacher, labels = inputs()
    exact = definition(student, teacher, labels)
    (grad,) = torch.autograd.grad(exact, student)
    value = loss(student, teacher, labels)
    torch.testing.assert_close(value, exact)
    torch.testing.assert_close(torch.autograd.grad(value, student)[0], grad)
    flat = loss(student.flatten(0, 1), teacher.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(flat, exact)
    total = loss(student, teacher, labels, normalize=False)
    torch.testing.assert_close(total, exact * (labels != -100).sum())
    for chunks in (3, 5) if chunked is not None else ():
        parts = chunked(student.chunk(chunks, dim=1), teacher.chunk(chunks, dim=1), labels)
        torch.testing.assert_close(parts, exact)


def logits_of(projection: nn.Linear, hidden: Tensor) -> Tensor:
    """What a projection computes, its soft cap in float64 too."""
    if not isinstance(projection, CappedLinear):
        return projection(hidden)
    return projection.softcap * torch.tanh(nn.functional.linear(hidden, projection.weight) / projection.softcap)


class Adapted(nn.Linear):
    """A projection that is more than a product, as one with an adapter."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.5 * x.sum(-1, keepdim=True) * self.weight.sum(-1)


@pytest.mark.parametrize("kind", ["plain", "bias", "capped", "adapted", "frozen"])
@pytest.mark.parametrize(("loss", "chunked", "definition"), CASES)
def test_divergence_of_hidden_states_equals_its_definition(loss, chunked, definition, kind, monkeypatch):
    """Gradients of hidden states and weights, in several chunks; the teacher's vocabulary has padding."""
    monkeypatch.setattr(kd_losses_module, "_MIN_CHUNK_ROWS", 4)
    torch.manual_seed(0)
    hidden = torch.randn(2, 12, 6).double().requires_grad_()
    states = torch.randn(2, 12, 10).double()
    makers = {"capped": lambda: CappedLinear(6, 19, 2.0), "adapted": lambda: Adapted(6, 19, bias=False)}
    projection = makers.get(kind, lambda: nn.Linear(6, 19, bias=kind == "bias"))().double()
    projection.requires_grad_(kind != "frozen")
    of_teacher = CappedLinear(10, 24, 3.0).double()
    labels = torch.randint(0, 19, (2, 12))
    labels[:, :5] = -100
    wanted = [hidden, *(parameter for parameter in projection.parameters() if parameter.requires_grad)]
    exact = definition(logits_of(projection, hidden), logits_of(of_teacher, states).detach()[..., :19], labels)
    grads = torch.autograd.grad(exact, wanted)
    total, count = (chunked or loss).distill(hidden, labels, projection, TeacherStates(states, of_teacher))
    torch.testing.assert_close(total / count, exact)
    torch.testing.assert_close(torch.autograd.grad(total / count, wanted), grads)
    with torch.no_grad():
        again, _ = loss.distill(hidden, labels, projection, TeacherStates(states, of_teacher))
    torch.testing.assert_close(again, total)


@pytest.mark.parametrize(("loss", "chunked", "definition"), CASES[:1] + CASES[3:])
def test_tokens_beyond_top_k_are_compared_as_one_bucket(loss, chunked, definition):
    """With top_k, both distributions have k + 1 outcomes: the teacher's likeliest tokens, and any other."""
    student, teacher, labels = inputs()
    loss = copy.copy(loss)
    k = 3
    likeliest = teacher.argsort(-1, descending=True)[..., :k]
    is_unlikely = torch.ones_like(teacher, dtype=torch.bool).scatter(-1, likeliest, False)

    def folded(logits: Tensor) -> Tensor:
        probs = (logits / 2.0).softmax(-1)
        return torch.cat([probs.gather(-1, likeliest), (probs * is_unlikely).sum(-1, keepdim=True)], -1).log()

    exact = definition(folded(student), folded(teacher), labels)
    (grad,) = torch.autograd.grad(exact, student)
    loss.top_k = k
    loss.temperature = 2.0
    value = loss(student, teacher, labels)
    torch.testing.assert_close(value, exact)
    torch.testing.assert_close(torch.autograd.grad(value, student)[0], grad)
    loss.top_k = teacher.shape[-1]
    with pytest.raises(ValueError, match="top_k is"):
        loss(student, teacher, labels)


@pytest.mark.parametrize(("loss", "chunked", "definition"), CASES)
def test_equal_models_no_labels_and_excluded_tokens(loss, chunked, definition):
    student, teacher, labels = inputs()
    torch.testing.assert_close(loss(student, student.detach(), labels), definition(student, student, labels))
    nothing = torch.full_like(labels, -100)
    assert loss(student, teacher, nothing) == 0
    if chunked is not None:
        assert chunked(student.chunk(3, dim=1), teacher.chunk(3, dim=1), nothing) == 0
    excluded = torch.zeros(19, dtype=torch.float64)
    excluded[-2:] = -torch.inf  # entries of a padded vocabulary
    value = loss(student + excluded, teacher + excluded, labels)
    torch.testing.assert_close(value, loss(student[..., :-2], teacher[..., :-2], labels))
    assert torch.autograd.grad(value, student)[0].isfinite().all()


def test_bf16_logits_are_computed_in_float32():
    student, teacher, labels = (tensor.detach() for tensor in inputs())
    value = ForwardKLLoss()(student.bfloat16(), teacher.bfloat16(), labels)
    assert value.dtype == torch.float32
    exact = ForwardKLLoss()(student.bfloat16().double(), teacher.bfloat16().double(), labels)
    assert abs(value - exact) <= 1e-6


def test_a_compiled_divergence_is_the_same():
    student, teacher, labels = (tensor.detach() for tensor in inputs())
    loss = ForwardKLWithChunkedOutputLoss(3)
    exact = loss(student.chunk(3, dim=1), teacher.chunk(3, dim=1), labels)
    assert loss.apply_compile_strategy(backend="aot_eager") is loss
    torch.testing.assert_close(loss(student.chunk(3, dim=1), teacher.chunk(3, dim=1), labels), exact)


def test_wrong_arguments_of_distillation_are_refused():
    student, teacher, labels = inputs()
    with pytest.raises(ValueError, match=r"cover 10 positions .* labels have 12"):
        ForwardKLWithChunkedOutputLoss(2)(student[:, :10].chunk(2, 1), teacher[:, :10].chunk(2, 1), labels)
    with pytest.raises(ValueError, match=r"sym_kd_ratio is 1\.5"):
        SymmetricKLLoss(1.5)
    with pytest.raises(ValueError, match=r"beta is -0\.1"):
        GeneralizedJSDLoss(-0.1)
    with pytest.raises(ValueError, match="temperature is 0"):
        ForwardKLLoss(temperature=0)
    with pytest.raises(ValueError, match="num_output_chunks is 0"):
        ReverseKLWithChunkedOutputLoss(0)
