"""What the library takes from torchao: configurations, fake quantizers, and the states of optimizers of few bits."""

import logging

import pytest
import torch
from torch import nn

from torchtune.modules.low_precision.torchao_interface import (
    StateFormat,
    fake_quantize_configs,
    float8_config,
    group_size,
    int_config,
    low_bit_format,
    quantize_linears,
    quantized,
    torchao_quantization,
)

pytest.importorskip("torchao")


@pytest.mark.parametrize("dynamic_activations", [False, True])
@pytest.mark.parametrize("size", [None, 16])
def test_the_group_size_of_a_configuration_is_the_one_that_it_was_made_with(size, dynamic_activations):
    assert group_size(int_config(4, size, dynamic_activations=dynamic_activations)) == size


def test_other_configurations_of_torchao_may_have_a_group_size():
    assert group_size(torchao_quantization().Int4WeightOnlyConfig(group_size=64)) == 64
    assert group_size(float8_config()) is None


@pytest.mark.parametrize(
    ("config", "dtype", "groups"),
    [
        (int_config(4, 16, dynamic_activations=False), torch.int8, 2),
        (int_config(8, None, dynamic_activations=False), torch.int8, 1),
        (float8_config(), torch.float8_e4m3fn, 1),
    ],
)
def test_a_weight_is_its_quantized_values_times_their_scales(config, dtype, groups):
    torch.manual_seed(0)
    weight = torch.randn(6, 32)
    values, scale = quantized(weight, config)
    assert values.dtype == dtype
    assert scale.shape == (6, groups)
    decoded = values.float() * scale.float().repeat_interleave(32 // groups, 1)
    steps = {2: 7, 1: 127}[groups]  # of four bits in groups, of eight bits in rows
    largest_error = weight.abs().max() / (16 if dtype.is_floating_point else steps)
    assert 0 < (decoded - weight).abs().max() <= largest_error


def test_weights_without_quantized_inputs_have_no_configuration_of_inputs():
    inputs, weights = fake_quantize_configs(int_config(4, 16, dynamic_activations=False), 16)
    assert inputs is None
    assert weights.group_size == 16


def test_only_the_given_layers_are_quantized():
    model = nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 16))
    quantize_linears(model, int_config(8, None, dynamic_activations=False), {"1"})
    assert type(model[0].weight) is nn.Parameter
    assert type(model[1].weight) is not nn.Parameter


def test_torchao_is_imported_without_changing_what_the_process_logs():
    logging.disable(logging.INFO)
    try:
        torchao_quantization.cache_clear()
        torchao_quantization()
        assert logging.root.manager.disable == logging.INFO
    finally:
        logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", ["8bit", "4bit", "fp8"])
@pytest.mark.parametrize(("elements", "stored"), [(0, 16), (1, 16), (16, 16), (17, 32)])
def test_a_state_of_few_bits_fills_its_last_block(name, elements, stored):
    state = StateFormat(name, 16).zeros(elements, torch.device("cpu"), signed=True)
    assert type(state).__name__.lower() == f"optimstate{name}"
    assert state.shape == (stored,)
    assert state.dequantize().abs().sum() == 0


@pytest.mark.parametrize(
    ("class_name", "state", "torch_class"),
    [
        ("AdamW8bit", "8bit", torch.optim.AdamW),
        ("AdamW4bit", "4bit", torch.optim.AdamW),
        ("AdamWFp8", "fp8", torch.optim.AdamW),
        ("Adam8bit", "8bit", torch.optim.Adam),
    ],
)
def test_an_optimizer_of_torchao_has_a_format_and_a_class_of_torch(class_name, state, torch_class):
    torchao_optim = pytest.importorskip("torchao.optim")
    optimizer = getattr(torchao_optim, class_name)([nn.Parameter(torch.ones(2))], block_size=32)
    assert low_bit_format(optimizer) == (StateFormat(state, 32), torch_class)


def test_other_optimizers_have_no_state_format():
    assert low_bit_format(torch.optim.AdamW([nn.Parameter(torch.ones(2))])) is None
