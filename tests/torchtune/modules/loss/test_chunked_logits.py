"""Log-probabilities of a projection equal their formula, and full logits never exist."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from torchtune.modules.loss import linear_log_probs

TOKENS, DIM, VOCAB = 23, 12, 51


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states [t, d], weight [v, d], bias [v], targets [t]."""
    rng = torch.Generator().manual_seed(0)
    shapes = ((TOKENS, DIM), (VOCAB, DIM), (VOCAB,))
    drawn = (torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes)
    return *drawn, torch.randint(VOCAB, (TOKENS,), generator=rng)


def formula(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, softcap: float | None, temperature: float
) -> tuple[Tensor, Tensor]:
    logits = F.linear(hidden, weight, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = torch.log_softmax(logits / temperature, -1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def gradients(log_probs: Tensor, entropy: Tensor | None, leaves: list[Tensor]) -> list[Tensor]:
    """Of a sum in which every token weighs differently."""
    weights = torch.linspace(-1, 2, TOKENS, dtype=log_probs.dtype)
    total = (log_probs * weights).sum()
    if entropy is not None:
        total = total + (entropy * weights.flip(0)).sum()
    return list(torch.autograd.grad(total, leaves, retain_graph=True))


@pytest.mark.parametrize("chunk_rows", [None, 7, 1])
@pytest.mark.parametrize(("with_bias", "softcap"), [(False, None), (True, None), (True, 2.5)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equals_the_formula_in_float64(chunk_rows, with_bias, softcap, temperature):
    hidden, weight, bias, targets = inputs()
    leaves = [hidden, weight, bias] if with_bias else [hidden, weight]
    used_bias = bias if with_bias else None
    exact, exact_entropy = formula(hidden, weight, targets, used_bias, softcap, temperature)
    options = {"bias": used_bias, "softcap": softcap, "temperature": temperature, "chunk_rows": chunk_rows}
    log_probs, entropy = linear_log_probs(hidden, weight, targets, return_entropy=True, **options)
    for actual, expected in ((log_probs, exact), (entropy, exact_entropy)):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    for actual, expected in zip(
        gradients(log_probs, entropy, leaves), gradients(exact, exact_entropy, leaves), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-11)
    alone = linear_log_probs(hidden, weight, targets, **options)
    assert torch.equal(alone, log_probs)
    for actual, expected in zip(gradients(alone, None, leaves), gradients(exact, None, leaves), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_low_precision_stays_near_float64(dtype, tolerance):
    hidden, weight, _, targets = inputs(dtype)
    exact_leaves = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    exact, exact_entropy = formula(*exact_leaves, targets, None, None, 1.0)
    log_probs, entropy = linear_log_probs(hidden, weight, targets, return_entropy=True, chunk_rows=5)
    assert (log_probs.dtype, entropy.dtype) == (torch.float32, torch.float32)
    results = [log_probs, entropy, *gradients(log_probs, entropy, [hidden, weight])]
    assert [tensor.dtype for tensor in results[2:]] == [dtype, dtype]
    wanted = [exact, exact_entropy, *gradients(exact, exact_entropy, exact_leaves)]
    for actual, expected in zip(results, wanted, strict=True):
        assert (actual.double() - expected).norm() <= tolerance * expected.norm()


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_full_logits_never_exist():
    tokens, vocab, rows = 4096, 512, 64
    hidden = torch.randn(tokens, 4, requires_grad=True)
    weight = torch.randn(vocab, 4, requires_grad=True)
    with LargestTensor() as seen:
        log_probs, entropy = linear_log_probs(
            hidden, weight, torch.zeros(tokens, dtype=torch.int64), return_entropy=True, chunk_rows=rows
        )
        (log_probs - entropy).sum().backward()
    assert seen.elements == rows * vocab < tokens * vocab
    assert hidden.grad is not None
    assert weight.grad is not None


def test_frozen_inputs_get_no_gradient_and_empty_batches_are_valid():
    hidden, weight, _, targets = inputs()
    linear_log_probs(hidden.detach(), weight, targets).sum().backward()
    assert weight.grad is not None
    with torch.no_grad():
        assert not linear_log_probs(hidden, weight, targets).requires_grad
    nothing = linear_log_probs(hidden[:0], weight, targets[:0])
    assert nothing.shape == (0,)
    nothing.sum().backward()
    assert not hidden.grad.any()
    with pytest.raises(ValueError, match=r"hidden is \[23, 12\] and targets \[1, 23\]"):
        linear_log_probs(hidden, weight, targets[None])
    with pytest.raises(ValueError, match="must be positive"):
        linear_log_probs(hidden, weight, targets, temperature=0.0)
    with pytest.raises(RuntimeError, match="out of bounds"):  # labels with an ignore index
        linear_log_probs(hidden, weight, torch.full_like(targets, -100))
