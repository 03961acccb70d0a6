"""Quantizers in training, against torchao, which does the rounding, and against the quantized trained weights."""

import copy

import pytest
import torch
from torch import nn

from tests.torchtune.modules.low_precision.small import TOKENS, make_model
from torchtune.modules.conversion import ConversionError, apply_conversions
from torchtune.modules.low_precision.layers import FakeQuantLinear, fake_quant_layers
from torchtune.modules.low_precision.quantizers import FakeQuantize, quantizable_layers
from torchtune.modules.low_precision.torchao_interface import torchao_quantization
from torchtune.modules.moe import GroupedExperts
from torchtune.modules.peft import LoRA, QATLoRALinear
from torchtune.training import quantization
from torchtune.utils import UserError

pytest.importorskip("torchao")

INT8_INT4 = quantization.Int8DynActInt4WeightQATQuantizer(groupsize=16)
QAT_QUANTIZERS = [
    INT8_INT4,
    quantization.Int4WeightOnlyQATQuantizer(groupsize=16),
    quantization.Int8WeightOnlyQATQuantizer(),
]


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(TOKENS).float().square().mean().backward()
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return {name: parameter.grad.clone() for name, parameter in trained}


@pytest.mark.parametrize("quantizer", QAT_QUANTIZERS, ids=lambda quantizer: quantizer.mode)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prepared_model_computes_as_torchaos_and_as_the_converted_one(quantizer, dtype):
    plain = make_model(dtype=dtype)
    prepared = quantizer.prepare(copy.deepcopy(plain))
    torchao_model = copy.deepcopy(plain)
    torchao = torchao_quantization()
    torchao.quantize_(
        torchao_model,
        torchao.qat.QATConfig(quantizer.base_config, step="prepare"),
        filter_fn=lambda module, path: isinstance(module, nn.Linear) and "layers" in path,
    )
    assert torch.equal(prepared(TOKENS), torchao_model(TOKENS))
    assert not torch.equal(prepared(TOKENS), plain(TOKENS))
    prepared_gradients = gradients(prepared)
    for name, gradient in gradients(torchao_model).items():
        assert torch.equal(prepared_gradients[name], gradient), name
    assert prepared_gradients["layers.0.attn.q_proj.weight"].abs().max() > 0
    with torch.no_grad():
        simulated = prepared(TOKENS)
        converted = quantizer.convert(prepared)
        assert torch.equal(converted(TOKENS), simulated), "what was trained is what is exported"
    assert type(converted.layers[0].mlp.w1.weight).__name__ == "IntxUnpackedToInt8Tensor"
    assert torch.equal(converted.output.weight, plain.output.weight), "the output projection keeps its precision"
    assert converted.conversions == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lora_is_trained_for_the_quantized_merged_weight(dtype):
    lora = LoRA(rank=2, alpha=4, apply_to_mlp=True)
    prepared = make_model(lora, dtype)
    is_trained = {name: parameter.requires_grad for name, parameter in prepared.named_parameters()}
    INT8_INT4.prepare(prepared)
    assert {name: parameter.requires_grad for name, parameter in prepared.named_parameters()} == is_trained
    assert type(prepared.layers[0].attn.q_proj) is QATLoRALinear
    merged = make_model(dtype=dtype)
    for path, layer in fake_quant_layers(prepared).items():
        merged.get_submodule(path).weight.data = layer.merged_weight(layer.weight)
    INT8_INT4.prepare(merged)
    assert torch.equal(prepared(TOKENS), merged(TOKENS))

    # dL/dB = s dL/dW Aᵀ and dL/dA = s Bᵀ dL/dW, where W is the merged weight
    adapter_gradients = gradients(prepared)
    assert adapter_gradients.keys() == {name for name, requires_grad in is_trained.items() if requires_grad}
    layer = prepared.layers[1].mlp.w2
    weight_gradient = gradients(merged)["layers.1.mlp.w2.weight"].float()
    expected = {
        "lora_b": layer.scaling * weight_gradient @ layer.lora_a.weight.float().T,
        "lora_a": layer.scaling * layer.lora_b.weight.float().T @ weight_gradient,
    }
    tolerance = {"atol": 1e-6, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 1e-3, "rtol": 1e-2}
    for name, gradient in expected.items():
        assert torch.allclose(adapter_gradients[f"layers.1.mlp.w2.{name}.weight"].float(), gradient, **tolerance)


def test_recipes_of_earlier_releases_swap_lora_layers_by_torchaos_configurations():
    model = make_model(LoRA(rank=2, alpha=4))
    prepared = INT8_INT4.prepare(copy.deepcopy(model))
    qat = torchao_quantization().qat
    inputs = qat.IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False, scale_precision=None)
    weights = qat.IntxFakeQuantizeConfig(torch.int4, group_size=16, scale_precision=None)
    for config, expected in (
        (INT8_INT4.get_activation_fake_quantize_config(), inputs),
        (INT8_INT4.get_weight_fake_quantize_config(), weights),
    ):
        assert (config.dtype, config.granularity) == (expected.dtype, expected.granularity)
    assert quantization.Int8WeightOnlyQATQuantizer().get_activation_fake_quantize_config() is None
    quantization.swap_lora_linear_with_qat(model, inputs, weights)
    assert type(model.layers[0].attn.v_proj) is QATLoRALinear
    x = torch.randn(3, 32)
    assert torch.equal(model.layers[0].attn.v_proj(x), prepared.layers[0].attn.v_proj(x))


@pytest.mark.parametrize(
    ("lora", "quantizer", "message"),
    [
        (
            None,
            quantization.Int4WeightOnlyQATQuantizer(),
            "groupsize 256 does not divide the 32 inputs of 'layers.0.*: choose one",
        ),
        (
            LoRA(rank=2, use_dora=True),
            INT8_INT4,
            "'layers.0.attn.q_proj' has a DoRA adapter.*set use_dora to False",
        ),
        (LoRA(rank=2, dropout=0.1), INT8_INT4, "lora_dropout is 0.1: .* set it to 0"),
    ],
)
def test_a_model_that_cannot_be_simulated_is_refused_and_unchanged(lora, quantizer, message):
    model = make_model(lora)
    with pytest.raises(ConversionError, match=message):
        quantizer.prepare(model)
    assert not fake_quant_layers(model)


def test_layers_to_quantize_are_those_of_the_transformer_layers():
    paths = quantizable_layers(make_model(LoRA(rank=2, alpha=4)))
    assert len(paths) == 2 * (4 + 3)  # projections of attention and of the MLP, in both layers
    assert not [path for path in paths if "lora" in path or "output" in path.split(".")]


def test_models_without_linear_layers_to_quantize_are_refused():
    mlp = nn.ModuleDict({"experts": GroupedExperts(dim=8, hidden_dim=8, num_experts=2)})
    with pytest.raises(ConversionError, match="the experts of 'experts' cannot be quantized yet"):
        quantizable_layers(mlp)
    with pytest.raises(ConversionError, match="Linear has no linear layer in a list called 'layers'"):
        quantizable_layers(nn.Linear(2, 2))


def test_a_configuration_that_torchao_cannot_simulate_or_compute_is_refused():
    torchao = torchao_quantization()
    with pytest.raises(ConversionError, match=r"torchao cannot simulate Int8WeightOnlyConfig in training \("):
        apply_conversions(make_model(), [FakeQuantize(torchao.Int8WeightOnlyConfig())])

    class CudaQuantizer(quantization.Int4WeightOnlyQuantizer):
        base_config = torchao.Int4WeightOnlyConfig(group_size=16)

    with pytest.raises(ConversionError, match=r"torchao refuses Int4WeightOnlyConfig on (cpu|cuda)"):
        CudaQuantizer(groupsize=16).quantize(make_model())


def test_training_takes_a_quantizer_for_training():
    quantizer = quantization.Int4WeightOnlyQuantizer(groupsize=16)
    with pytest.raises(UserError, match="Int4WeightOnlyQuantizer cannot be simulated in training: choose Int8DynAct"):
        quantization.fake_quantization(quantizer, None, lambda: 0, 1)


def test_fake_quantization_that_starts_after_the_run_is_refused():
    with pytest.raises(ConversionError, match="is 5, but the run ends after 5 steps"):
        FakeQuantize(INT8_INT4.base_config, after_n_steps=5, step=lambda: 0, total_steps=5)
    with pytest.raises(ConversionError, match="pass step, a function that returns the steps taken so far"):
        FakeQuantize(INT8_INT4.base_config, after_n_steps=1)


def test_convert_takes_a_prepared_model():
    with pytest.raises(UserError, match=r"convert\(\) takes a model of prepare\(\)"):
        INT8_INT4.convert(make_model())


def test_fake_quantized_layers_are_linear_layers_with_the_same_parameter_names():
    model = make_model()
    names = [name for name, _ in model.named_parameters()]
    INT8_INT4.prepare(model)
    assert [name for name, _ in model.named_parameters()] == names
    assert isinstance(model.layers[0].mlp.w1, FakeQuantLinear)
    assert issubclass(FakeQuantLinear, nn.Linear)
