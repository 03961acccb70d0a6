"""Whatever is trained is written, or the save is refused with the name of what would be lost."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from tests.torchtune.checkpoints.small import build, refusal, write_folder
from torchtune.checkpoints import FullModelHFCheckpointer
from torchtune.modules.conversion import Conversion, ConversionReport, Phase
from torchtune.modules.peft import LoRA

MERGED = ("adapter", "merged")


class Scaled(Conversion):
    """A conversion from outside, whose parameters stand in no layout; it says that they are its own, or does not."""

    phase: ClassVar[Phase] = Phase.KERNEL

    def __init__(self, *, claims: bool) -> None:
        self.claims = claims

    def convert(self, model: nn.Module) -> ConversionReport:
        model.norm.gain = nn.Parameter(torch.ones(4))
        return ConversionReport("Scaled", num_parameters=4)

    def owned_parameters(self, model: nn.Module) -> set[str]:
        return {"norm.gain"} if self.claims else set()


def unfreeze(model: nn.Module, name: str) -> None:
    model.get_parameter(name).requires_grad_(True)


def refused(model: nn.Module, folder: Path, **contents: Any) -> str:
    """Both the save and the check before training refuse; the message, one sentence."""
    store = FullModelHFCheckpointer(folder / "in", output_dir=folder / "out")
    message = refusal(store.save, "epoch_0", model, **contents)
    assert not list((folder / "out").glob("*"))
    if "state" not in contents and contents.get("contents") != MERGED:
        assert refusal(store.check_contents, model, **contents) == message
    return message


def test_saving_a_base_without_its_trained_adapter_is_refused(tmp_path):
    model = build(write_folder(tmp_path / "in"), LoRA(4, 8, attn_modules=["q_proj"]))
    message = refused(model, tmp_path)
    assert "'layers.0.attn.q_proj.lora_a.weight' (and 5 more) is trained" in message
    assert "lora_finetune_single_device" in message
    assert 'contents="adapter"' in message


def test_saving_an_adapter_without_trained_base_weights_is_refused(tmp_path):
    model = build(write_folder(tmp_path / "in"), LoRA(4, 8))
    unfreeze(model, "norm.scale")
    message = refused(model, tmp_path, contents="adapter")
    assert "'norm.scale' is trained" in message
    assert "full_finetune_single_device" in message
    # A resume reads the adapter, whatever else is written.
    assert "'norm.scale'" in refused(model, tmp_path, contents=MERGED, state={"progress": {}})


@pytest.mark.parametrize(
    ("claims", "contents", "reason"),
    [
        (False, {}, "'norm.gain' has no name in Hugging Face's format"),
        (False, {"contents": "adapter"}, "'norm.gain' is trained, but checkpoints would hold only what has a name"),
        (False, {"contents": MERGED}, "'norm.gain' has no name in Hugging Face's format"),
        (True, {}, "'norm.gain' is trained, but checkpoints would hold the base weights alone"),
        (True, {"contents": MERGED}, "give its conversion a method merged(name, weight, model)"),
    ],
)
def test_parameters_without_a_layout_are_refused(claims, contents, reason, tmp_path):
    lora = [LoRA(4, 8)] if contents else []
    model = build(write_folder(tmp_path / "in"), Scaled(claims=claims), *lora)
    unfreeze(model, "norm.gain")
    message = refused(model, tmp_path, **contents)
    assert reason in message
    assert claims or "owned_parameters(model)" in message


def test_adapter_that_cannot_be_merged_is_refused(tmp_path):
    conversion = LoRA(4, 8)
    model = build(write_folder(tmp_path / "in"), conversion)

    class Foreign(Conversion):
        phase, convert = conversion.phase, conversion.convert
        owned_parameters, peft_config = conversion.owned_parameters, conversion.peft_config

    model.conversions = [Foreign()]
    assert "merged weights" in refused(model, tmp_path, contents=MERGED)


def test_parameter_that_a_hook_moves_counts_as_trained(tmp_path):
    model = build(write_folder(tmp_path / "in"), LoRA(4, 8))

    class Mover(Conversion):
        phase = Phase.OBJECTIVE

        def convert(self, model: nn.Module) -> ConversionReport:
            return ConversionReport("Mover", ["norm"])

        def moved_parameters(self, model: nn.Module) -> set[str]:
            return {"norm.scale"}

    model.conversions = [*model.conversions, Mover()]
    assert "'norm.scale' is trained" in refused(model, tmp_path, contents="adapter")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_trained_weights_that_are_not_finite_are_never_saved(tmp_path, value):
    """Frozen weights may be what the checkpoint says."""
    folder = write_folder(tmp_path / "in")
    store = FullModelHFCheckpointer(folder, output_dir=tmp_path / "out")
    model = build(folder).to_empty(device="cpu")
    store.load_model(model)
    store.save("step_1", model, state={"progress": {"global_step": 1}})
    with torch.no_grad():
        model.norm.scale[1] = value
    for options in ({}, {"state": {"progress": {"global_step": 2}}}, {"optional": True}, {"async_save": True}):
        message = refusal(store.save, "step_2", model, **options)
        assert "1 of 30 trained parameters have values that are NaN or infinite, such as 'norm.scale'" in message
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["step_1"]
    model.norm.scale.requires_grad_(False)
    store.save("step_2", model)
