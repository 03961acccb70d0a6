"""A conversion that stores weights in another form: resumed, and refused if it returns others; see test_sharded.py."""

from pathlib import Path

import pytest
import torch

from tests.torchtune.checkpoints.small import build, load, resume, same_bits, started
from torchtune.modules.conversion import ConversionError, apply_conversions
from torchtune.modules.low_precision import FrozenInt8Linear, QuantizeBase
from torchtune.modules.peft import LoRA


def test_a_builder_with_lora_beside_the_conversion(source: Path) -> None:
    """LoRA, which is there already, is undone and applied again; so it is, if another conversion comes in between."""
    model = build(source, LoRA(rank=4, alpha=8))
    apply_conversions(model, [QuantizeBase("int8")])
    assert isinstance(model.layers[0].attn.q_proj, FrozenInt8Linear)
    model.conversions[1].revert(model)
    assert type(model.layers[0].attn.q_proj) is FrozenInt8Linear
    assert not any("lora" in name for name, _ in model.named_parameters())


def test_resume_of_a_full_run(source: Path, tmp_path: Path) -> None:
    store, model = started(source, QuantizeBase("int8"), output=tmp_path)
    with torch.no_grad():
        model.norm.scale.mul_(1.5)
    store.save("step_3", model, state={"progress": {"step": 3}})
    again = load(source, QuantizeBase("int8"))
    assert resume(store, again) == {"progress": {"step": 3}}
    assert same_bits(again.state_dict(), model.state_dict())


class Wrong(QuantizeBase):
    """Returns the weight as it is."""

    def from_full(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: tensor}


def test_tensors_that_are_not_those_of_the_parameters(source: Path) -> None:
    with pytest.raises(ConversionError, match=r"from_full\('layers.0.* of Wrong returned .*torch.int8 \["):
        load(source, Wrong("int8"))
