"""Products in float8, emulated, against the formula in float64."""

import pytest
import torch
from torch import nn

from torchtune.models.llama3_2 import llama3_2
from torchtune.modules.conversion import ConversionError, apply_conversions
from torchtune.modules.low_precision import Float8Training, QuantizeBase
from torchtune.modules.peft import LoRA
from torchtune.training.quantization import convert_to_float8_training

pytest.importorskip("torchao")


def make_model(width: int = 32) -> nn.Module:
    torch.manual_seed(0)
    return llama3_2(
        vocab_size=64, num_layers=2, num_heads=2, num_kv_heads=1, embed_dim=width, max_seq_len=64, intermediate_dim=48
    )


def rounded(x: torch.Tensor, dtype: torch.dtype, dim: int | None, power_of_two: bool) -> torch.Tensor:
    """``x`` as float8 with one scale, or one along ``dim``, represents it."""
    largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = torch.finfo(dtype).max / largest.double()
    scale = (2 ** scale.log2().floor() if power_of_two else scale).float()
    return (x * scale).to(dtype).double() / scale


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_products_are_those_of_rounded_operands(recipe):
    model = make_model()
    linear = model.layers[0].mlp.w1
    weight = linear.weight.detach().clone()
    names = [name for name, _ in model.named_parameters()]
    (report,) = apply_conversions(model, [Float8Training(recipe, emulate=True)])
    assert len(report.replaced) == 14
    assert [name for name, _ in model.named_parameters()] == names
    converted = model.layers[0].mlp.w1
    x, grad = torch.randn(21, 32, requires_grad=True), torch.randn(21, 48)  # 21 tokens: no multiple of 16
    out = converted(x)
    out.backward(grad)
    e4m3, e5m2, by_row = torch.float8_e4m3fn, torch.float8_e5m2, recipe != "tensorwise"
    dim = 1 if by_row else None
    wanted = rounded(x.detach(), e4m3, dim, by_row) @ rounded(weight, e4m3, dim, by_row).T
    assert (out - wanted).abs().max() < 1e-5 * wanted.abs().max()
    gradient_dtype = e4m3 if by_row else e5m2
    other = None if recipe != "rowwise" else 0
    wanted = rounded(grad, gradient_dtype, dim, by_row) @ rounded(weight, e4m3, other, by_row)
    assert (x.grad - wanted).abs().max() < 1e-5 * wanted.abs().max()
    if recipe == "rowwise_with_gw_hp":
        wanted = grad.double().T @ x.detach().double()
    else:
        operands = [(grad, gradient_dtype), (x.detach(), e4m3)]
        left, right = (rounded(item, dtype, 0 if by_row else None, by_row) for item, dtype in operands)
        wanted = left.T @ right
    assert (converted.weight.grad - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_a_model_learns_and_what_does_not_fit_is_told():
    model = make_model(width=24)  # layers from and to 24 are no multiples of 16: only attention's 48 …
    with pytest.raises(ConversionError, match="none of the 14 linear layers has widths that are multiples of 16"):
        convert_to_float8_training(model)
    model = make_model()
    model.layers[1].mlp.w2 = nn.Linear(40, 32)
    (report,) = apply_conversions(model, [Float8Training(emulate=True)])
    assert "emulated" in report.note
    assert "1 stay as they are, their widths are no multiples of 16: layers.*.mlp.w2" in report.note
    model, tokens = make_model(), torch.randint(0, 64, (2, 9))
    optimizer, losses = torch.optim.AdamW(convert_to_float8_training(model, "rowwise").parameters(), lr=1e-2), []
    for _ in range(8):
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("other", [LoRA(rank=2, alpha=4, target_modules=["q_proj"]), QuantizeBase("int8")])
def test_frozen_weights_are_refused(other):
    with pytest.raises(ConversionError, match="products in float8 are for weights that are trained"):
        apply_conversions(make_model(), [Float8Training(), other])


def test_what_is_not_there():
    with pytest.raises(ConversionError, match="recipe is 'mxfp8': MXFP8 and NVFP4 are not there; choose out of tens"):
        Float8Training("mxfp8")
