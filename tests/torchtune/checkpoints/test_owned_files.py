"""Parameters that a conversion from outside owns are saved in a file for its class, and come back."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import torchtune
from tests.torchtune.checkpoints.small import (
    build,
    close,
    in_peft,
    in_transformers,
    load,
    logits,
    read,
    resume,
    same_bits,
    started,
    write_folder,
)
from torchtune.checkpoints import CheckpointError, FullModelHFCheckpointer
from torchtune.modules.conversion import Conversion, ConversionError, ConversionReport, Phase
from torchtune.modules.peft import LoRA, disable_adapter, owned_parameters
from torchtune.utils import UserError


class ScaledLinear(nn.Linear):
    """Outputs times factors."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.factors = nn.Parameter(linear.weight.new_empty(linear.out_features))

    def initialize_parameters(self) -> None:
        nn.init.ones_(self.factors)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factors


class Scale(Conversion):
    """Factors of keys and values; the base is trained too."""

    phase = Phase.KERNEL
    first = 0

    def convert(self, model: nn.Module) -> ConversionReport:
        for layer in model.layers[self.first :]:
            layer.attn.k_proj = ScaledLinear(layer.attn.k_proj)
            layer.attn.v_proj = ScaledLinear(layer.attn.v_proj)
        return ConversionReport("Scale", ["k_proj", "v_proj"])

    def owned_parameters(self, model: nn.Module) -> set[str]:
        return {f"{path}.factors" for path, layer in model.named_modules() if isinstance(layer, ScaledLinear)}

    def merged(self, name: str, weight: torch.Tensor, model: nn.Module) -> torch.Tensor:
        path, _, leaf = name.rpartition(".")
        layer = model.get_submodule(path)
        if not isinstance(layer, ScaledLinear):
            return weight
        return weight * (layer.factors.detach() if leaf == "bias" else layer.factors.detach().unsqueeze(1))


class ScaleAlone(Scale):
    """The base is frozen."""

    phase = Phase.ADAPTER

    def convert(self, model: nn.Module) -> ConversionReport:
        model.requires_grad_(False)
        return super().convert(model)


class ScaleApart(Conversion):
    """Factors of values as parameters of the attention, not of the layer with the weight."""

    phase = Phase.ADAPTER

    def convert(self, model: nn.Module) -> ConversionReport:
        model.requires_grad_(False)
        for layer in model.layers:
            rows = layer.attn.v_proj.out_features
            layer.attn.value_factors = nn.Parameter(torch.ones(rows, device=layer.attn.v_proj.weight.device))
            layer.attn.initialize_parameters = lambda attn=layer.attn: nn.init.ones_(attn.value_factors)
            layer.attn.v_proj.register_forward_hook(lambda _, __, out, attn=layer.attn: out * attn.value_factors)
        return ConversionReport("ScaleApart")

    def owned_parameters(self, model: nn.Module) -> set[str]:
        return {f"layers.{number}.attn.value_factors" for number in range(len(model.layers))}

    def merged(self, name: str, weight: torch.Tensor, model: nn.Module) -> torch.Tensor:
        path, _, leaf = name.rpartition(".v_proj.")
        if not path:
            return weight
        factors = model.get_parameter(f"{path}.value_factors").detach()
        return weight * (factors if leaf == "bias" else factors.unsqueeze(1))


class Wrapped(nn.Module):
    """A module around a layer, which renames its weights."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer


class Wrap(Conversion):
    phase = Phase.KERNEL

    def convert(self, model: nn.Module) -> ConversionReport:
        model.layers[0].attn.k_proj = Wrapped(model.layers[0].attn.k_proj)
        return ConversionReport("Wrap", ["k_proj"])


def randomize(model: nn.Module) -> None:
    torch.manual_seed(4)
    with torch.no_grad():
        for name in sorted(owned_parameters(model)):
            model.get_parameter(name).add_(torch.randn_like(model.get_parameter(name)) * 0.2)


def owned(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: model.get_parameter(name).detach().clone() for name in owned_parameters(model)}


@pytest.mark.parametrize("kind", [ScaleAlone, ScaleApart])
def test_owned_files_are_read_back_and_merged(kind, tmp_path):
    base = write_folder(tmp_path / "base", "qwen2")
    model, _ = torchtune.load(base, adapter=kind(), device="cpu")
    plain = logits(model)
    randomize(model)
    expected = logits(model)
    assert (expected - plain).abs().max() > 0.1

    saved = torchtune.save(model, tmp_path / "saved")
    assert same_bits(load_file(saved / f"adapter_{kind.__name__}.safetensors"), owned(model))
    assert not list(saved.glob("adapter_model*"))
    assert read(saved / "adapter_conversions.json") == {
        "base_model_name_or_path": str(base),
        "conversions": {f"adapter_{kind.__name__}.safetensors": f"{__name__}.{kind.__name__}"},
    }
    both = torchtune.save(model, tmp_path / "both", contents=("adapter", "merged"))
    for folder in (saved, both / "adapter"):
        again, _ = torchtune.load(folder, adapter=kind(), device="cpu")
        assert torch.equal(logits(again), expected)
    with pytest.raises(CheckpointError, match=f"parameters of the conversion .*{kind.__name__}, which the model does"):
        torchtune.load(saved, device="cpu")
    with pytest.raises(CheckpointError, match="which the model does not have: add it to model_converters"):
        torchtune.load(base, adapter=saved, device="cpu")

    close(logits(in_transformers(both)), expected)


def test_owned_file_lies_beside_an_adapter_of_peft(tmp_path):
    base = write_folder(tmp_path / "base", "llama")
    model, _ = torchtune.load(base, adapter=[LoRA(2, attn_modules=["q_proj"]), Scale()], device="cpu")
    randomize(model)
    saved = torchtune.save(model, tmp_path / "saved")
    expected = logits(model)
    again, _ = torchtune.load(saved, adapter=Scale(), device="cpu")
    assert torch.equal(logits(again), expected)

    (saved / "adapter_Scale.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks adapter_Scale.safetensors, the parameters of a conversion"):
        torchtune.load(saved, adapter=Scale(), device="cpu")
    peft_model = in_peft(in_transformers(base), saved)
    with torch.no_grad():
        for name in Scale().owned_parameters(model):
            model.get_parameter(name).fill_(1)
    close(logits(peft_model), logits(model))


def test_a_run_resumes_from_owned_files(tmp_path):
    base = write_folder(tmp_path / "base", "qwen2")

    checkpointer, model = started(base, ScaleAlone())
    randomize(model)
    checkpointer.save("step_1", model, contents="adapter", state={"progress": {"step": 1}})
    again = load(base, ScaleAlone())
    assert resume(checkpointer, again) == {"progress": {"step": 1}}
    assert same_bits(owned(again), owned(model))
    with pytest.raises(UserError, match="an adapter, but the model of this run has none"):
        resume(checkpointer, load(base))


def test_conversion_that_loses_weights_is_refused_before_training(tmp_path):
    base = write_folder(tmp_path / "base", "llama")
    checkpointer = FullModelHFCheckpointer(base, output_dir=tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"'layers.0.attn.k_proj.weight' \(but 'layers.0.attn.k_proj.layer.w"):
        torchtune.load(base, adapter=Wrap(), device="cpu")
    for contents in ("model", "adapter"):
        with pytest.raises(CheckpointError, match="replace a layer by one of a subclass instead of wrapping it"):
            checkpointer.check_contents(build(base, Wrap()), contents=contents)

    class Unnamed(ScaleAlone):
        def owned_parameters(self, model: nn.Module) -> set[str]:
            return set()

    with pytest.raises(CheckpointError, match=r"'layers.0.attn.k_proj.factors'.*owned_parameters\(model\) of the conv"):
        checkpointer.check_contents(build(base, Unnamed()))
    with pytest.raises(CheckpointError, match=r"'layers.0.attn.k_proj.factors' has no name in Hugging Face's format"):
        torchtune.load(base, adapter=Unnamed(), device="cpu")


def test_owned_files_of_another_conversion_are_refused(tmp_path):
    base = write_folder(tmp_path / "base", "llama")
    model, _ = torchtune.load(base, adapter=ScaleAlone(), device="cpu")
    saved = torchtune.save(model, tmp_path / "saved")

    class Fewer(ScaleAlone):
        first = 1

    Fewer.__name__ = "ScaleAlone"
    with pytest.raises(
        CheckpointError, match=r"adapter_ScaleAlone.safetensors holds 'layers.0.attn.k_proj.factors', u"
    ):
        torchtune.load(saved, adapter=Fewer(), device="cpu")
    for content in ({"conversions": []}, {"conversions": {}, "base_model_name_or_path": [1]}):
        (saved / "adapter_conversions.json").write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=r"adapter_conversions\.json"):
            torchtune.load(saved, adapter=ScaleAlone(), device="cpu")


def test_a_merge_keeps_shape_and_dtype(tmp_path):
    class Widening(ScaleAlone):
        def merged(self, name: str, weight: torch.Tensor, model: nn.Module) -> torch.Tensor:
            return super().merged(name, weight, model).double()

    model, _ = torchtune.load(write_folder(tmp_path / "base"), adapter=Widening(), device="cpu")
    with pytest.raises(
        ConversionError, match=r"merged\('layers.0.attn.k_proj.weight', …\) of Widening returned .*float64"
    ):
        torchtune.save(model, tmp_path / "merged", contents="merged")


def test_module_that_cannot_be_disabled_is_named(tmp_path):
    model = build(write_folder(tmp_path / "base"), ScaleAlone())
    with (
        pytest.raises(ConversionError, match=r"'layers.0.attn.k_proj.factors' cannot be switched off"),
        disable_adapter(model),
    ):
        pass
