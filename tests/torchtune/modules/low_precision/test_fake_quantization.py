"""Fake-quantized layers: what autograd keeps of them, and the switch that a model's layers share."""

import copy

import pytest
import torch
from torch import nn

from tests.torchtune.modules.low_precision.small import TOKENS, make_model
from torchtune.modules.conversion import apply_conversions
from torchtune.modules.low_precision.layers import fake_quant_layers, set_fake_quant
from torchtune.modules.low_precision.quantizers import FakeQuantize
from torchtune.training import quantization

pytest.importorskip("torchao")


def test_autograd_keeps_no_quantized_copy_of_a_weight():
    model = quantization.Int4WeightOnlyQATQuantizer(groupsize=16).prepare(make_model())
    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    weight_shapes = {layer.weight.shape for layer in fake_quant_layers(model).values()}
    copies = []

    def record(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape in weight_shapes and tensor.data_ptr() not in parameters:
            copies.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        model(TOKENS).sum()
    assert not copies


def test_fake_quantization_begins_after_the_given_steps():
    plain = make_model()
    quantizer = quantization.Int8DynActInt4WeightQATQuantizer(groupsize=16)
    always_on = quantizer.prepare(copy.deepcopy(plain))
    steps_done = 0
    model = copy.deepcopy(plain)
    conversion = FakeQuantize(quantizer.base_config, after_n_steps=2, step=lambda: steps_done, total_steps=3)
    (report,) = apply_conversions(model, [conversion])
    assert "from step 3 on" in report.note
    assert torch.equal(model(TOKENS), plain(TOKENS))
    steps_done = 1
    assert torch.equal(model(TOKENS), plain(TOKENS))
    steps_done = 2
    assert torch.equal(model(TOKENS), always_on(TOKENS))
    assert not torch.equal(model(TOKENS), plain(TOKENS))


def test_copied_model_begins_fake_quantization_by_itself():
    model = make_model()
    quantizer = quantization.Int8DynActInt4WeightQATQuantizer(groupsize=16)
    conversion = FakeQuantize(quantizer.base_config, after_n_steps=2, step=lambda: 2, total_steps=3)
    apply_conversions(model, [conversion])
    set_fake_quant(model.layers[0].attn.q_proj, enabled=False)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(TOKENS), quantizer.prepare(make_model())(TOKENS))
    assert not model.layers[0].attn.q_proj.fake_quant.on


def test_one_layer_switches_all_layers_of_its_model():
    plain = make_model()
    model = quantization.Int8WeightOnlyQATQuantizer().prepare(copy.deepcopy(plain))
    simulated = model(TOKENS)
    set_fake_quant(model.layers[0].attn.q_proj, enabled=False)
    assert torch.equal(model(TOKENS), plain(TOKENS))
    set_fake_quant(model.layers[1].mlp.w2)
    assert torch.equal(model(TOKENS), simulated)
    set_fake_quant(nn.Linear(2, 2), enabled=False)  # changes nothing, as model.apply calls it for every module


@pytest.mark.parametrize("mode", ["8da4w-qat", "4w-qat", "8w-qat", "4w-qat-module-swap", "8da4w-qat-module-swap"])
def test_recipes_of_earlier_releases_switch_every_mode_of_training(mode):
    plain = make_model()
    model = quantization.Int4WeightOnlyQATQuantizer(groupsize=16).prepare(copy.deepcopy(plain))
    simulated = model(TOKENS)
    model.apply(quantization._get_disable_fake_quant(mode))
    assert torch.equal(model(TOKENS), plain(TOKENS))
    model.apply(quantization._get_enable_fake_quant(mode))
    assert torch.equal(model(TOKENS), simulated)


def test_a_mode_without_fake_quantization_has_no_switch():
    assert quantization._get_enable_fake_quant("8da4w") is None
    assert quantization._get_disable_fake_quant("8da4w") is None
