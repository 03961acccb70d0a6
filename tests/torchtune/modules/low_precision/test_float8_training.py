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


def round_to_float8(x: torch.Tensor, dtype: torch.dtype, dim: int | None, power_of_two: bool) -> torch.Tensor:
    """Return the values of ``x`` in float8 with one scale, or one along ``dim``, in float64."""
    largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = torch.finfo(dtype).max / largest.double()
    if power_of_two:
        scale = 2 ** scale.log2().floor()
    scale = scale.float()
    return (x * scale).to(dtype).double() / scale


def assert_near(value: torch.Tensor, expected: torch.Tensor) -> None:
    assert (value - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_products_are_those_of_operands_rounded_to_float8(recipe):
    model = make_model()
    weight = model.layers[0].mlp.w1.weight.detach().clone()
    names = [name for name, _ in model.named_parameters()]
    (report,) = apply_conversions(model, [Float8Training(recipe, emulate=True)])
    assert len(report.replaced) == 14
    assert [name for name, _ in model.named_parameters()] == names

    layer = model.layers[0].mlp.w1
    x = torch.randn(21, 32, requires_grad=True)  # 21 tokens: no multiple of 16
    grad = torch.randn(21, 48)
    out = layer(x)
    out.backward(grad)

    e4m3 = torch.float8_e4m3fn
    by_row = recipe != "tensorwise"  # then scales are powers of two
    # Dimensions along which a scale is shared: of rows and of columns of an operand.
    of_rows = 1 if by_row else None
    of_columns = 0 if by_row else None
    gradient_dtype = e4m3 if by_row else torch.float8_e5m2

    rounded_x = round_to_float8(x.detach(), e4m3, of_rows, by_row)
    rounded_weight = round_to_float8(weight, e4m3, of_rows, by_row)
    assert_near(out, rounded_x @ rounded_weight.T)

    rounded_grad = round_to_float8(grad, gradient_dtype, of_rows, by_row)
    weight_dim = of_columns if recipe == "rowwise" else None  # rowwise_with_gw_hp keeps one scale of the weight here
    assert_near(x.grad, rounded_grad @ round_to_float8(weight, e4m3, weight_dim, by_row))

    if recipe == "rowwise_with_gw_hp":
        expected = grad.double().T @ x.detach().double()
    else:
        rounded_grad = round_to_float8(grad, gradient_dtype, of_columns, by_row)
        expected = rounded_grad.T @ round_to_float8(x.detach(), e4m3, of_columns, by_row)
    assert_near(layer.weight.grad, expected)


def test_a_model_without_layers_of_suitable_widths_is_refused():
    model = make_model(width=24)  # all layers have a side of 24
    with pytest.raises(ConversionError, match="none of the 14 linear layers has widths that are multiples of 16"):
        convert_to_float8_training(model)


def test_layers_of_other_widths_stay_and_are_reported():
    model = make_model()
    model.layers[1].mlp.w2 = nn.Linear(40, 32)
    (report,) = apply_conversions(model, [Float8Training(emulate=True)])
    assert len(report.replaced) == 13
    assert "emulated" in report.note
    assert "1 stay as they are, their widths are no multiples of 16: layers.*.mlp.w2" in report.note
    assert type(model.layers[1].mlp.w2) is nn.Linear
    assert type(model.output) is not type(model.layers[0].mlp.w1), "the output projection stays in high precision"


def test_a_model_learns_in_float8():
    model = convert_to_float8_training(make_model(), "rowwise")
    tokens = torch.randint(0, 64, (2, 9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("other", [LoRA(rank=2, alpha=4, target_modules=["q_proj"]), QuantizeBase("int8")])
def test_conversions_that_freeze_weights_exclude_float8_training(other):
    with pytest.raises(ConversionError, match="products in float8 are for weights that are trained"):
        apply_conversions(make_model(), [Float8Training(), other])


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("mxfp8", "recipe is 'mxfp8': MXFP8 and NVFP4 are not there; choose out of tensorwise, rowwise"),
        ("row", "recipe is 'row': choose out of tensorwise, rowwise"),
    ],
)
def test_an_unknown_recipe_is_refused_with_the_known_ones(recipe, message):
    with pytest.raises(ConversionError, match=message):
        Float8Training(recipe)
