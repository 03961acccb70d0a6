"""Freezing by pattern: what is trained, what is refused, and that nothing is kept for frozen weights."""

import pytest
import torch
from torch import nn

from torchtune.models.llama3 import llama3
from torchtune.modules import Freeze, TiedLinear, TransformerDecoder
from torchtune.modules.conversion import ConversionError, apply_conversions
from torchtune.modules.low_precision import Float8Training
from torchtune.modules.peft import LoRA
from torchtune.training import setup_optimizer

TOKENS = torch.arange(20).view(2, 10)


def make(tied: bool = False) -> TransformerDecoder:
    """A small random decoder with 12 layers."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 41, "num_layers": 12, "num_heads": 2, "num_kv_heads": 2, "embed_dim": 16, "max_seq_len": 32}
    model = llama3(**sizes, intermediate_dim=32)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    if tied:
        del model.output
        model.output = TiedLinear(model.tok_embeddings)
    return model


def modules_of(names: set[str]) -> set[str]:
    """Layers, and modules outside of layers, that hold the weights."""
    modules = set()
    for name in names:
        first, second, *_ = name.split(".")
        modules.add(f"layers.{second}" if first == "layers" else first)
    return modules


@pytest.mark.parametrize(
    ("settings", "trained"),
    [
        ({"train": ["layers.1[01]", "norm"]}, {"layers.10", "layers.11", "norm"}),
        ({"train": ["layers.1"]}, {"layers.1"}),
        ({"train": ["layers.(1|2)", "layers.1.attn"]}, {"layers.1", "layers.2"}),
        ({"freeze": ["layers", "tok_embeddings"]}, {"output", "norm"}),
        ({"freeze": [r"layers\.\d", "tok_.*"]}, {"layers.10", "layers.11", "norm", "output"}),
    ],
)
def test_patterns_match_whole_components_of_names(settings, trained):
    model = make()
    (report,) = apply_conversions(model, [Freeze(**settings)])
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert modules_of(names) == trained
    count = sum(model.get_parameter(name).numel() for name in names)
    assert f"of {sum(p.numel() for p in model.parameters()):,} parameters {count:,} are trained" in str(report)


def test_single_parameters_are_chosen_by_the_end_of_their_name():
    model = make()
    apply_conversions(model, [Freeze(train=["attn.q_proj.weight", "layers.3.mlp.w[13]"])])
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    expected = {f"layers.{layer}.attn.q_proj.weight" for layer in range(12)}
    assert names == expected | {"layers.3.mlp.w1.weight", "layers.3.mlp.w3.weight"}


def test_training_is_that_of_plain_torch_without_state_for_frozen_weights():
    model = make()
    plain = make()
    apply_conversions(model, [Freeze(train=["layers.1[01]", "norm"])])
    trained = [p for n, p in plain.named_parameters() if n.startswith(("layers.10.", "layers.11.", "norm"))]
    optimizers = [
        setup_optimizer(lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1), model),
        torch.optim.AdamW(trained, lr=0.01, weight_decay=0.1),
    ]
    for _ in range(3):
        for trained_model, optimizer in zip((model, plain), optimizers, strict=True):
            trained_model(TOKENS).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(optimizers[0].state) == len(trained)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, plain.get_parameter(name)), name
        if not parameter.requires_grad:
            assert parameter.grad is None


def test_no_activation_is_kept_below_the_first_trained_layer():
    saved = []
    model = make()
    apply_conversions(model, [Freeze(train=["layers.11"])])
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.numel()), lambda unused: unused):
        model.layers[11].register_forward_pre_hook(lambda *unused: saved.append("the last layer"))
        model(TOKENS)
    assert saved[0] == "the last layer"


def test_output_that_is_tied_is_frozen_with_the_embedding():
    model = make(tied=True)
    (report,) = apply_conversions(model, [Freeze(train=["layers"])])
    assert not model.tok_embeddings.weight.requires_grad
    assert "the output is tied to the embedding and frozen with it" in str(report)
    with pytest.raises(ConversionError, match="'output' is tied to the token embedding of this model: name tok_emb"):
        apply_conversions(make(tied=True), [Freeze(freeze=["output"])])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "either in train or in freeze"),
        ({"train": ["norm"], "freeze": ["output"]}, "either in train or in freeze"),
        ({"train": "norm"}, "train is 'norm': give a list of patterns"),
        ({"freeze": []}, r"freeze is \[\]: give a list of patterns"),
        ({"train": ["*.q_proj"]}, r"'\*\.q_proj', which is no regular expression \(nothing to repeat"),
        ({"train": ["layers.1[2-9]"]}, r"no weight of the model matches 'layers\.1\[2-9\]', the nearest names are"),
        (
            {"train": ["norm", "layers.0.attn.qproj"]},
            r"qproj', the nearest names .*layers\.\*\.attn\.q_proj",
        ),
        ({"freeze": ["lm_head"]}, "'lm_head', the nearest names are output"),
        ({"freeze": [".*"]}, "freezes all .* weights, so nothing would be trained"),
        ({"freeze": ["layers", "tok_embeddings", "norm", "output"]}, "freezes all .* weights"),
    ],
)
def test_patterns_that_cannot_be_meant_are_refused(settings, words):
    model = make()
    with pytest.raises(ConversionError, match=words):
        apply_conversions(model, [Freeze(**settings)])
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_adapters_are_chosen_by_their_own_settings():
    model = make()
    with pytest.raises(ConversionError, match=r"the model has adapters.*target_modules and train_modules"):
        apply_conversions(model, [LoRA(rank=2), Freeze(train=["layers.1"])])


def test_weights_stay_frozen_if_layers_are_replaced_later():
    with torch.device("meta"):
        model = make()
        apply_conversions(model, [Freeze(train=["layers.1[01]"])])
        frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        apply_conversions(model, [Float8Training("tensorwise")])
    assert {name for name, parameter in model.named_parameters() if not parameter.requires_grad} == frozen
