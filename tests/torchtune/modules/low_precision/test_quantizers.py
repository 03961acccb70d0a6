"""Fake quantization against torchao, which owns the arithmetic, and against what it makes of the trained weights."""

import copy

import pytest
import torch
from torch import nn

from torchtune.models.llama3 import llama3
from torchtune.modules import TransformerDecoder
from torchtune.modules.conversion import ConversionError, apply_conversions
from torchtune.modules.low_precision.fake_quantization import FakeQuantLinear, fake_quant_layers
from torchtune.modules.low_precision.quantizers import FakeQuantize
from torchtune.modules.low_precision.torchao_interface import torchao_quantization
from torchtune.modules.peft import LoRA, QATLoRALinear
from torchtune.training import quantization as q
from torchtune.utils import UserError

TOKENS = torch.arange(24).view(2, 12) % 50
QUANTIZERS = [
    q.Int8DynActInt4WeightQATQuantizer(groupsize=16),
    q.Int4WeightOnlyQATQuantizer(groupsize=16),
    q.Int8WeightOnlyQATQuantizer(),
]


def make(lora: LoRA | None = None, dtype: torch.dtype = torch.float32) -> TransformerDecoder:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 32, "max_seq_len": 64}
    model = llama3(intermediate_dim=48, **sizes).to(dtype)
    if lora is not None:
        apply_conversions(model, [lora])
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                nn.init.normal_(parameter, std=0.1)
    return model


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(TOKENS).float().square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=lambda quantizer: quantizer.mode)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prepared_model_computes_as_torchaos_and_as_the_converted_one(quantizer, dtype):
    ao, plain = torchao_quantization(), make(dtype=dtype)
    prepared, theirs = quantizer.prepare(copy.deepcopy(plain)), copy.deepcopy(plain)
    config = ao.qat.QATConfig(quantizer.base_config, step="prepare")
    ao.quantize_(theirs, config, filter_fn=lambda module, path: isinstance(module, nn.Linear) and "layers" in path)
    assert torch.equal(prepared(TOKENS), theirs(TOKENS))
    assert not torch.equal(prepared(TOKENS), plain(TOKENS))
    ours = gradients(prepared)
    assert all(torch.equal(ours[name], grad) for name, grad in gradients(theirs).items())
    assert ours["layers.0.attn.q_proj.weight"].abs().max() > 0
    with torch.no_grad():
        before = prepared(TOKENS)
        converted = quantizer.convert(prepared)
        assert torch.equal(converted(TOKENS), before), "what was trained is what is exported"
    assert type(converted.layers[0].mlp.w1.weight).__name__ == "IntxUnpackedToInt8Tensor"
    assert torch.equal(converted.output.weight, plain.output.weight), "the output projection keeps its precision"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lora_learns_for_the_merged_quantised_weight(dtype):
    quantizer, lora = QUANTIZERS[0], LoRA(rank=2, alpha=4, apply_to_mlp=True)
    prepared = make(lora, dtype)
    names = {name: parameter.requires_grad for name, parameter in prepared.named_parameters()}
    quantizer.prepare(prepared)
    assert {name: parameter.requires_grad for name, parameter in prepared.named_parameters()} == names
    assert type(prepared.layers[0].attn.q_proj) is QATLoRALinear
    merged = make(dtype=dtype)
    for path, layer in fake_quant_layers(prepared).items():
        merged.get_submodule(path).weight.data = layer.merged_weight(layer.weight)
    quantizer.prepare(merged)
    assert torch.equal(prepared(TOKENS), merged(TOKENS))
    # dL/dB = s dL/dW Aᵀ and dL/dA = s Bᵀ dL/dW, where W is the merged weight
    ours, full = gradients(prepared), gradients(merged)
    layer, grad = prepared.layers[1].mlp.w2, full["layers.1.mlp.w2.weight"].float()
    atol = 1e-6 if dtype == torch.float32 else 1e-3
    assert ours.keys() == {name for name, trained in names.items() if trained}
    wanted = {"lora_b": grad @ layer.lora_a.weight.float().T, "lora_a": layer.lora_b.weight.float().T @ grad}
    for name, value in wanted.items():
        found = ours[f"layers.1.mlp.w2.{name}.weight"].float()
        assert torch.allclose(found, layer.scaling * value, atol=atol, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4)


def test_autograd_keeps_no_quantised_copy_of_a_weight():
    model, sizes = QUANTIZERS[1].prepare(make()), []
    own = {parameter.data_ptr() for parameter in model.parameters()}
    weights = {layer.weight.shape for layer in fake_quant_layers(model).values()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape in weights and tensor.data_ptr() not in own:
            sizes.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(TOKENS).sum()
    assert not sizes


def test_it_begins_after_some_steps_and_can_be_switched():
    plain, step = make(), [0]
    model, config = copy.deepcopy(plain), QUANTIZERS[0].base_config
    conversion = FakeQuantize(config, after_n_steps=2, step=lambda: step[0], total_steps=3)
    apply_conversions(model, [conversion])
    for step[0], same in enumerate((True, True, False)):
        assert torch.equal(model(TOKENS), plain(TOKENS)) == same
    always = QUANTIZERS[0].prepare(copy.deepcopy(plain))
    assert torch.equal(model(TOKENS), always(TOKENS))
    always.apply(q._get_disable_fake_quant("8da4w-qat"))
    assert torch.equal(always(TOKENS), plain(TOKENS))
    always.apply(q._get_enable_fake_quant("8da4w-qat"))
    assert torch.equal(always(TOKENS), model(TOKENS))


def test_lora_layers_of_a_copied_recipe_are_swapped():
    model, qat = make(LoRA(rank=2, alpha=4)), torchao_quantization().qat
    wanted = QUANTIZERS[0].prepare(copy.deepcopy(model))
    inputs = qat.IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False, scale_precision=None)
    weights = qat.IntxFakeQuantizeConfig(torch.int4, group_size=16, scale_precision=None)
    for found, meant in (
        (QUANTIZERS[0].get_activation_fake_quantize_config(), inputs),
        (QUANTIZERS[0].get_weight_fake_quantize_config(), weights),
    ):
        assert (found.dtype, found.granularity) == (meant.dtype, meant.granularity)
    q.swap_lora_linear_with_qat(model, inputs, weights)
    assert type(model.layers[0].attn.v_proj) is QATLoRALinear
    x = torch.randn(3, 32)
    assert torch.equal(model.layers[0].attn.v_proj(x), wanted.layers[0].attn.v_proj(x))


@pytest.mark.parametrize(
    ("lora", "quantizer", "said"),
    [
        (
            None,
            q.Int4WeightOnlyQATQuantizer(),
            "groupsize 256 does not divide the 32 inputs of 'layers.0.*: choose one",
        ),
        (
            LoRA(rank=2, use_dora=True),
            QUANTIZERS[0],
            "'layers.0.attn.q_proj' has a DoRA adapter.*set use_dora to False",
        ),
        (LoRA(rank=2, dropout=0.1), QUANTIZERS[0], "lora_dropout is 0.1: .* set it to 0"),
    ],
)
def test_what_cannot_be_simulated_is_one_sentence(lora, quantizer, said):
    model = make(lora)
    with pytest.raises(ConversionError, match=said):
        quantizer.prepare(model)
    assert not fake_quant_layers(model), "nothing has been changed"


def test_refusals_of_torchao_and_wrong_quantizers_are_one_sentence():
    ao = torchao_quantization()
    with pytest.raises(ConversionError, match=r"torchao cannot simulate Int8WeightOnlyConfig in training \("):
        apply_conversions(make(), [FakeQuantize(ao.Int8WeightOnlyConfig())])
    quantizer = q.Int4WeightOnlyQuantizer(groupsize=16)
    with pytest.raises(UserError, match="Int4WeightOnlyQuantizer cannot be simulated in training: choose Int8DynAct"):
        q.fake_quantization(quantizer, None, lambda: 0, 1)

    class Cuda(q.Int4WeightOnlyQuantizer):
        base_config = ao.Int4WeightOnlyConfig(group_size=16)

    with pytest.raises(ConversionError, match=r"torchao refuses Int4WeightOnlyConfig on (cpu|cuda)"):
        Cuda(groupsize=16).quantize(make())
    with pytest.raises(ConversionError, match="is 5, but the run ends after 5 steps"):
        FakeQuantize(QUANTIZERS[0].base_config, after_n_steps=5, step=lambda: 0, total_steps=5)
    with pytest.raises(UserError, match=r"convert\(\) takes a model of prepare\(\)"):
        QUANTIZERS[0].convert(make())
    assert issubclass(FakeQuantLinear, nn.Linear)
