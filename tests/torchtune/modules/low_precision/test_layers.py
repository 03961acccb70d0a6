"""Layers with frozen weights in a storage format: what autograd keeps, and what code that builds them sees."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchtune.modules.conversion import ConversionError
from torchtune.modules.low_precision import FrozenFloat8Linear, FrozenInt8Linear, FrozenNF4Linear
from torchtune.modules.low_precision.formats import NF4
from torchtune.modules.low_precision.layers import QuantizedExperts
from torchtune.modules.moe import GroupedExperts
from torchtune.modules.peft import LoRALinear

LAYER_CLASSES = [FrozenNF4Linear, FrozenInt8Linear, FrozenFloat8Linear]


@pytest.mark.parametrize("layer_class", LAYER_CLASSES)
@pytest.mark.parametrize("has_adapter", [False, True])
def test_no_full_weight_is_kept_for_the_backward_pass(layer_class, has_adapter):
    torch.manual_seed(0)
    layer = layer_class(128, 64, bias=True)
    x = torch.randn(2, 3, 128, requires_grad=True)
    weight = layer.full_weight().requires_grad_()
    F.linear(x, weight, layer.bias).sum().backward()
    expected_grad = x.grad
    x.grad = None
    if has_adapter:
        layer = LoRALinear.from_linear(layer, rank=2, alpha=4)
    saved_tensors = []

    def record(tensor: torch.Tensor) -> torch.Tensor:
        saved_tensors.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        layer(x).sum().backward()
    for tensor in saved_tensors:
        assert tensor.numel() < 64 * 64 or not tensor.dtype.is_floating_point
    torch.testing.assert_close(x.grad, expected_grad)


def test_a_bias_of_a_frozen_layer_may_be_trained():
    torch.manual_seed(0)
    layer = FrozenInt8Linear(16, 8, bias=True)
    layer.bias.requires_grad_(True)
    grad = torch.randn(2, 3, 8)
    layer(torch.randn(2, 3, 16)).backward(grad)
    torch.testing.assert_close(layer.bias.grad, grad.sum((0, 1)))


def test_a_lora_layer_of_a_users_own_model_quantizes_its_base():
    """``LoRALinear(quantize_base=True)``, as older code calls it."""
    torch.manual_seed(0)
    layer = LoRALinear(64, 32, rank=4, alpha=8, use_bias=True, quantize_base=True, scaler_block_size=256)
    assert isinstance(layer, FrozenNF4Linear)
    trained = [name for name, parameter in layer.named_parameters() if parameter.requires_grad]
    assert trained == ["lora_a.weight", "lora_b.weight"]
    layer.to(torch.bfloat16)
    assert layer.weight_range.dtype == torch.int32  # the bits of the scales


@pytest.mark.parametrize("layer_class", LAYER_CLASSES)
def test_without_quantization_a_layer_is_a_frozen_linear_layer_on_meta(layer_class):
    layer = layer_class(64, 32, bias=True, dtype=torch.bfloat16)
    plain = layer.without_quantization()
    assert type(plain) is nn.Linear
    assert {name: parameter.shape for name, parameter in plain.named_parameters()} == {
        "weight": (32, 64),
        "bias": (32,),
    }
    assert plain.weight.is_meta
    assert plain.weight.dtype == torch.bfloat16
    assert not plain.weight.requires_grad
    assert layer.full_weight().shape == (32, 64), "the quantized layer is not changed"


def test_without_quantization_experts_have_the_class_and_the_shapes_of_before():
    experts = GroupedExperts(dim=8, hidden_dim=16, num_experts=2)
    shapes = {name: parameter.shape for name, parameter in experts.named_parameters()}
    quantized = QuantizedExperts.from_experts(experts, NF4(torch.float32, block_size=8))
    assert not any(parameter.is_floating_point() for parameter in quantized.parameters())
    plain = quantized.without_quantization()
    assert type(plain) is GroupedExperts
    assert {name: parameter.shape for name, parameter in plain.named_parameters()} == shapes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 48}, "the block size 48 does not divide 64, the width of the input"),
        ({"blocksize": 32}, r"blocksize: no option of an NF4 weight, remove it \(there is block_size\)"),
    ],
)
def test_options_that_do_not_fit_a_layer_are_refused(options, message):
    with pytest.raises(ConversionError, match=message):
        FrozenNF4Linear(64, 32, **options)
