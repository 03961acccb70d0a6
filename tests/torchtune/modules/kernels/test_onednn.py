"""Products in float32 on CPU, against float64 and torch's own."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from torchtune.modules.kernels import onednn
from torchtune.modules.kernels.onednn import fast_products, linear, mm

needs_it = pytest.mark.skipif(not onednn._is_faster_here(), reason="MKL is as fast on this processor")


def _draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@needs_it
@pytest.mark.parametrize("rows", [64, 600], ids=["wide", "tall"])
def test_a_product_of_any_strides_equals_float64(rows):
    a = _draw(rows, 120)
    b = _draw(120, 300)
    for left in (a, a.t().contiguous().t(), a[:, :1].expand(rows, 120)):
        truth = left.double() @ b.double()
        for right in (b, b.t().contiguous().t()):
            torch.testing.assert_close(mm(left, right).double(), truth, rtol=0, atol=1e-4)


def _part(kind: str) -> torch.Tensor | None:
    """A bias, for some in strides that oneDNN does not look at, or in a shape that it does not know."""
    row = _draw(512)
    return {"none": None, "all": row[:256], "strided": row[::2], "one": row[:1]}[kind]


@needs_it
@pytest.mark.parametrize("bias", ["none", "all", "strided", "one"])
@pytest.mark.parametrize("trained", [{0}, {1}, {2}, {0, 1, 2}], ids=["input", "weight", "bias", "each"])
def test_a_layer_inside_and_its_gradients_equal_float64(bias, trained):
    parts = [_draw(2, 64, 2, 192)[:, :, 0], _draw(256, 192), _part(bias)]
    truth = []
    for part in parts:
        truth.append(None if part is None else part.double())
    trained = [index for index in trained if parts[index] is not None]
    if not trained:
        return
    for index in trained:
        parts[index].requires_grad_()
        truth[index].requires_grad_()
    with fast_products(parts[0]):
        y = F.linear(parts[0], weight=parts[1], bias=parts[2])
    reference = F.linear(*truth)
    torch.testing.assert_close(y.double(), reference, rtol=0, atol=1e-4)
    weights = _draw(2, 64, 1).expand_as(y)  # a gradient of stride 0
    y.mul_(2).backward(weights)
    reference.backward(2 * weights.double())
    for actual, expected in zip(parts, truth, strict=True):
        assert (actual is None or actual.grad is None) == (expected is None or expected.grad is None)
        if expected is not None and expected.grad is not None:
            torch.testing.assert_close(actual.grad.double(), expected.grad, rtol=1e-5, atol=1e-3)


@needs_it
def test_layers_behave_the_same_inside_fast_products():
    x = _draw(64, 192) / 16
    weight = _draw(256, 192)

    def product(weight: torch.Tensor) -> torch.Tensor:
        with fast_products(x):
            return F.linear(x, weight)

    def loss(weight: torch.Tensor, of: Callable[[torch.Tensor], torch.Tensor] = product) -> torch.Tensor:
        return of(weight).pow(3).sum()

    def exact(weight: torch.Tensor) -> torch.Tensor:
        return F.linear(x.to(weight.dtype), weight)

    wide = weight.double()
    wanted = torch.func.grad(partial(loss, of=exact))(wide)
    torch.testing.assert_close(torch.func.grad(loss)(weight).double(), wanted, rtol=1e-4, atol=1e-4)
    curved = torch.autograd.functional.hvp(partial(loss, of=exact), wide, wide)[1]
    torch.testing.assert_close(
        torch.autograd.functional.hvp(loss, weight, weight)[1].double(), curved, rtol=1e-4, atol=1e-4
    )
    with torch.autocast("cpu", torch.bfloat16):
        assert product(weight).dtype == torch.bfloat16
    weight.requires_grad_()
    with fast_products(x):  # what is computed again for backward is not inside any more
        y = checkpoint(F.linear, x, weight, use_reentrant=False)
    y.pow(3).sum().backward()
    torch.testing.assert_close(weight.grad.double(), wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        linear(x, _draw(256, 256))
