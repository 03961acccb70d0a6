"""Conversions run in order, are refused in a wrong one, and have their hooks called."""

import logging
from typing import ClassVar

import pytest
import torch
from torch import nn

from torchtune.modules.conversion import (
    Conversion,
    ConversionError,
    ConversionReport,
    Phase,
    apply_conversions,
    get_conversions,
    nearest_module_names,
    run_post_optimizer_hooks,
    run_pre_optimizer_hooks,
)
from torchtune.modules.peft import DoRALinear, LoRA, LoRALinear, get_adapter_state_dict
from torchtune.utils import UserError


class Recorder(nn.Module):
    """A model that remembers what was done to it."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.ModuleDict({"q_proj": nn.Linear(4, 4)})
        self.calls: list[str] = []


class Kernel(Conversion):
    """A third party's converter: nothing but a phase, ``convert`` and hooks."""

    phase: ClassVar[Phase] = Phase.KERNEL

    def __init__(self, name: str = "kernel") -> None:
        self.name = name

    def convert(self, model: Recorder) -> ConversionReport:
        model.calls.append(f"convert {self.name}")
        return ConversionReport(name=self.name, replaced=["attn"], note="by a test")

    def pre_optimizer_hook(self, model: Recorder) -> None:
        model.calls.append(f"pre {self.name}")

    def post_optimizer_hook(self, model: Recorder) -> None:
        model.calls.append(f"post {self.name}")


class QuantizedBase(Kernel):
    phase: ClassVar[Phase] = Phase.QUANTIZED_BASE


class FakeQuant(Kernel):
    phase: ClassVar[Phase] = Phase.FAKE_QUANT


def test_order_of_application_and_record(caplog):
    with torch.device("meta"):
        model = Recorder()
    first = Kernel("a")
    second = Kernel("b")
    lora = LoRA(2, 4, attn_modules=["q_proj"])
    with caplog.at_level(logging.INFO, logger="torchtune"):
        reports = apply_conversions(model, [first, second, lora])
    assert model.calls == ["convert a", "convert b"]
    assert [report.name for report in reports] == ["a", "b", "LoRA"]
    assert model.conversions == [first, second, lora] == get_conversions(model)
    assert caplog.messages == [
        "a: 1 modules converted (attn); by a test",
        "b: 1 modules converted (attn); by a test",
        "LoRA: 1 modules converted (q_proj), 16 parameters added; rank 2, alpha 4; everything else is frozen",
    ]
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_conversion_without_effect_is_a_warning(caplog):
    class Nothing(Kernel):
        def convert(self, model: Recorder) -> ConversionReport:
            return ConversionReport("Nothing")

    apply_conversions(Recorder(), [Nothing()])
    assert caplog.record_tuples == [("torchtune", logging.WARNING, "Nothing: 0 modules converted")]


def test_hooks_run_in_order_and_are_optional():
    model = Recorder()
    apply_conversions(model, [Kernel("a"), Kernel("b"), LoRA(2, 4)][:2])
    apply_conversions(model, [LoRA(2, 4, attn_modules=["q_proj"])])
    model.calls.clear()
    run_pre_optimizer_hooks(model)
    run_post_optimizer_hooks(model)
    assert model.calls == ["pre a", "pre b", "post a", "post b"]
    run_pre_optimizer_hooks(nn.Linear(1, 1))  # a model without conversions


def test_conversions_are_ordered_by_phase():
    with torch.device("meta"):
        model = Recorder()
    lora = LoRA(2, 4, attn_modules=["q_proj"])
    kernel = Kernel("a")
    again = Kernel("b")
    fake = FakeQuant("fake")
    apply_conversions(model, [fake, lora, kernel, again])
    assert model.calls == ["convert a", "convert b", "convert fake"]
    assert model.conversions == [kernel, again, lora, fake]


@pytest.mark.parametrize("kind", [LoRALinear, DoRALinear])
def test_a_conversion_of_an_earlier_phase_comes_before_the_lora_of_a_builder(kind):
    """The builder has applied LoRA already: the converter sees the model as if it had come first."""
    seen = []

    class Swap(Kernel):
        def convert(self, model: nn.Module) -> ConversionReport:
            seen.extend(type(module) for module in model.modules() if isinstance(module, nn.Linear | LoRALinear))
            return super().convert(model)

    def model_with(*conversions: Conversion) -> Recorder:
        with torch.device("meta"):
            model = Recorder()
            for conversion in conversions:
                apply_conversions(model, [conversion])
        return model

    lora = LoRA(2, 4, attn_modules=["q_proj"], use_dora=kind is DoRALinear)
    swap = Swap()
    model, wanted = model_with(lora, swap), model_with(swap, lora)
    assert set(seen) == {nn.Linear}
    assert get_conversions(model) == [swap, lora]
    assert type(model.attn["q_proj"]) is kind

    def described(module):
        return {name: (p.shape, p.dtype, p.requires_grad) for name, p in module.named_parameters()}

    assert described(model) == described(wanted)
    assert "attn.q_proj.bias" in described(model)


def test_a_conversion_before_one_that_cannot_be_undone_is_refused():
    model = Recorder()
    apply_conversions(model, [FakeQuant()])
    with pytest.raises(ConversionError, match="Kernel must come before FakeQuant, which the model already has"):
        apply_conversions(model, [Kernel()])
    model = Recorder()
    apply_conversions(model, [LoRA(2, 4, attn_modules=["q_proj"])])
    with pytest.raises(UserError, match="has adapters with values"):
        apply_conversions(model, [QuantizedBase()])
    assert model.calls == []
    assert "attn.q_proj.lora_a.weight" in model.state_dict()


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (QuantizedBase(), FakeQuant(), "needs a base weight that is not quantized"),
        (LoRA(2, 4), LoRA(4, 4), "a model has one adapter"),
        (QuantizedBase(), QuantizedBase(), "quantized once"),
    ],
)
def test_conversions_that_exclude_each_other_are_refused(first, second, reason):
    with pytest.raises(ConversionError, match=reason):
        apply_conversions(Recorder(), [first, second])


def test_objects_that_are_no_conversion_are_refused():
    class NoPhase(Conversion):
        def convert(self, model: nn.Module) -> ConversionReport:
            return ConversionReport("x")

    class NoReport(Kernel):
        def convert(self, model: Recorder) -> None:
            return None

    for thing, message in ((object(), "is no conversion"), (NoPhase(), "must set `phase`"), (NoReport(), "NoneType")):
        with pytest.raises(ConversionError, match=message):
            apply_conversions(Recorder(), [thing])


def test_nearest_names_hide_layer_numbers():
    paths = ["output"]
    for layer in range(3):
        paths += [f"layers.{layer}.attn.q_proj", f"layers.{layer}.attn.k_proj", f"layers.{layer}.mlp.w1"]
    assert nearest_module_names("q_prj", paths)[0] == "layers.*.attn.q_proj"
    assert nearest_module_names("otput", paths) == ["output"]
    assert len(nearest_module_names("zzz", paths)) == 3


def test_a_conversion_without_methods_has_defaults():
    class Mine(Conversion):
        phase = Phase.KERNEL

        def convert(self, model: nn.Module) -> ConversionReport:
            return ConversionReport("mine")

    model = Recorder()
    conversion = Mine()
    assert conversion.owned_parameters(model) == conversion.moved_parameters(model) == set()
    assert conversion.stored_weights(model) == conversion.peft_config(model) == conversion.new_rows(model) == {}
    weight = torch.ones(2)
    style = object()
    assert conversion.from_full("a", weight)["a"] is conversion.to_full("a", {"a": weight}) is weight
    assert conversion.merged("a", weight, model) is weight
    assert not conversion.can_merge
    assert conversion.parallel_style(model, style) is style
    with pytest.raises(NotImplementedError):
        conversion.revert(model)


def test_parameters_belong_to_an_adapter_by_their_module():
    model = Recorder()
    model.exploration = nn.Linear(4, 4)
    model.magnitudes = nn.Linear(4, 4)
    apply_conversions(model, [LoRA(2, 4, attn_modules=["q_proj"], use_dora=True)])
    (conversion,) = get_conversions(model)
    adapter_names = {f"attn.q_proj.{name}" for name in ("lora_a.weight", "lora_b.weight", "magnitude")}
    assert conversion.owned_parameters(model) == adapter_names
    # Where there is a state dict alone, names are read part by part.
    assert get_adapter_state_dict(model.state_dict()).keys() == adapter_names
