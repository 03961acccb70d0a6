"""Products in float32 on CPU, against float64 and torch's own."""

import pytest
import torch
from torch.nn import functional as F

from torchtune.modules import _products
from torchtune.modules._products import fast_linear, fast_products, linear, mm

needs_it = pytest.mark.skipif(not _products._is_faster_here(), reason="MKL is as fast on this processor")


def _draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@needs_it
@pytest.mark.parametrize("rows", [64, 600], ids=["wide", "tall"])
def test_a_product_of_any_strides_equals_float64(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_products, "_BLOCK", 10_000)
    a, b = _draw(rows, 120), _draw(120, 300)
    out = torch.ones(rows, 600)[:, ::2]
    for left in (a, a.t().contiguous().t(), a[:, :1].expand(rows, 120)):
        truth = left.double() @ b.double()
        torch.testing.assert_close(mm(left, b).double(), truth, rtol=0, atol=1e-4)
        torch.testing.assert_close(mm(left, b.t().contiguous().t(), out=out).double(), truth, rtol=0, atol=1e-4)
        mm(left, b, out=out, add=True)
        torch.testing.assert_close(out.double(), 2 * truth, rtol=0, atol=2e-4)


@needs_it
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_inside_and_its_gradients_equal_float64(bias: bool) -> None:
    layer = torch.nn.Linear(192, 256, bias=bias)
    x = _draw(2, 64, 192).requires_grad_()
    assert fast_linear(x, layer.weight) is not None
    with fast_products(x):
        y = layer(x)
    assert "_Linear" in type(y.grad_fn).__name__
    weights = _draw(2, 64, 1).expand_as(y)  # a gradient of stride 0
    y.backward(weights)
    wide, reference = x.detach().double().requires_grad_(), torch.nn.Linear(192, 256, bias=bias).double()
    reference.load_state_dict(layer.state_dict())
    truth = reference(wide)
    truth.backward(weights.double())
    torch.testing.assert_close(y.double(), truth, rtol=0, atol=1e-5)
    for ours, theirs in ((x, wide), *zip(layer.parameters(), reference.parameters(), strict=True)):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-5, atol=1e-4)


def test_what_is_small_or_of_another_dtype_is_left_to_torch() -> None:
    weight = _draw(256, 192)
    assert fast_linear(_draw(4, 192), weight) is None
    assert fast_linear(_draw(192), weight) is None
    assert fast_linear(_draw(64, 192).bfloat16(), weight.bfloat16()) is None
    small = _draw(4, 192)
    assert torch.equal(linear(small, weight), F.linear(small, weight))
