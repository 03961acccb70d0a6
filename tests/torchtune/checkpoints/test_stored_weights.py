"""A conversion that stores weights in another form: loaded, saved, resumed, sharded, and merged with LoRA on top."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.torchtune.checkpoints import ranks
from tests.torchtune.checkpoints.int8_rows import Int8Linear, Int8Rows, dequantized, quantized
from tests.torchtune.checkpoints.small import (
    build,
    close,
    hf_model,
    load,
    logits,
    randomize_adapter,
    same_bits,
    stored,
    write_folder,
)
from torchtune.modules.conversion import ConversionError
from torchtune.modules.low_precision import QuantizeBase
from torchtune.modules.peft import LoRA, LoRALinear
from torchtune.training import FullModelHFCheckpointer

SHAPE = "qwen2"  # biases, and rotary rows in another order than in files
SIZES = {"num_hidden_layers": 2}


def rounded(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder, those of linear layers quantized and dequantized, in the order of rows of files."""
    tensors = stored(folder)
    for name, tensor in tensors.items():
        if "proj.weight" in name:
            tensors[name] = dequantized(*quantized(tensor), torch.float32)
    return tensors


def reference(folder: Path) -> nn.Module:
    model = hf_model(SHAPE, **SIZES)
    model.load_state_dict(rounded(folder))
    return model


def saved(model: nn.Module, folder: Path, name: str, **contents: Any) -> Path:
    return FullModelHFCheckpointer(folder / "in", output_dir=folder / name).save("step_1", model, **contents)


def lora(dora: bool = False) -> LoRA:
    return LoRA(rank=4, alpha=8, attn_modules=["q_proj", "output_proj"], apply_to_mlp=True, use_dora=dora)


@pytest.mark.parametrize("by_rows", [True, False])
def test_load_and_save(by_rows: bool, tmp_path: Path) -> None:
    write_folder(tmp_path / "in", SHAPE, **SIZES)
    model = load(tmp_path / "in", Int8Rows(by_rows=by_rows))
    q_proj = model.layers[0].attn.q_proj
    assert type(q_proj) is Int8Linear
    assert q_proj.weight.dtype == torch.int8
    close(logits(model), logits(reference(tmp_path / "in")))
    folder = saved(model, tmp_path, "out")
    assert same_bits(stored(folder), rounded(tmp_path / "in"))
    again = load(folder, Int8Rows(by_rows=by_rows))  # int8 of what int8 represents is the same
    assert same_bits(stored(saved(again, tmp_path, "again")), stored(folder))


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_an_adapter_on_top(dora: bool, tmp_path: Path) -> None:
    write_folder(tmp_path / "in", SHAPE, **SIZES)
    model = load(tmp_path / "in", lora(dora), Int8Rows())
    q_proj = model.layers[0].attn.q_proj
    assert isinstance(q_proj, Int8Linear)
    assert isinstance(q_proj, LoRALinear)
    close(logits(model), logits(reference(tmp_path / "in")))
    randomize_adapter(model)
    wanted = logits(model)
    merged = load(saved(model, tmp_path, "merged", contents=("adapter", "merged")))
    assert type(merged.layers[0].attn.q_proj) is nn.Linear
    close(logits(merged), wanted)
    # A resume reads the base again, and the adapter of the checkpoint.
    saved(model, tmp_path, "run", contents="adapter", state={"progress": {"step": 1}})
    store = FullModelHFCheckpointer(tmp_path / "in", output_dir=tmp_path / "run")
    resumed, progress = build(tmp_path / "in", Int8Rows(), lora(dora)), {"step": 0}
    store.load_model(resumed)
    store.resume(store.find_resume_point(), resumed, {"progress": progress})
    assert progress == {"step": 1}
    assert same_bits(dict(resumed.named_parameters()), dict(model.named_parameters()))


def test_a_builder_with_lora_beside_the_conversion(tmp_path: Path) -> None:
    """LoRA, which is there already, is undone and applied again; so it is, if another conversion comes in between."""
    from torchtune.modules.conversion import apply_conversions

    write_folder(tmp_path / "in", SHAPE, **SIZES)
    model = build(tmp_path / "in", lora())
    apply_conversions(model, [Int8Rows()])
    assert isinstance(model.layers[0].attn.q_proj, Int8Linear)
    model.conversions[1].revert(model)
    assert type(model.layers[0].attn.q_proj) is Int8Linear
    assert not any("lora" in name for name, _ in model.named_parameters())


def test_resume_of_a_full_run(tmp_path: Path) -> None:
    write_folder(tmp_path / "in", SHAPE, **SIZES)
    model = load(tmp_path / "in", Int8Rows())
    with torch.no_grad():
        model.norm.scale.mul_(1.5)
    saved(model, tmp_path, "run", state={"progress": {"step": 3}})
    store = FullModelHFCheckpointer(tmp_path / "in", output_dir=tmp_path / "run")
    resumed, progress = build(tmp_path / "in", Int8Rows()), {"step": 0}
    store.load_model(resumed)
    store.resume(store.find_resume_point(), resumed, {"progress": progress})
    assert progress == {"step": 3}
    assert same_bits(dict(resumed.named_parameters()), dict(model.named_parameters()))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*.safetensors"))}


def same_as_alone(how: str, kind: str, contents: dict[str, bool]) -> Callable[[Path], None]:
    def case(folder: Path) -> None:
        model = ranks.shard(build(folder / "in", *conversions(kind)), how)
        FullModelHFCheckpointer(folder / "in").load_model(model)
        for name, parameter in torch.load(folder / f"{kind}.pt").items():
            assert torch.equal(ranks.whole(model.get_parameter(name)), parameter), f"{case.__name__}: {name}"
        randomize_adapter(model)
        folder_of_ranks = saved(model, folder, case.__name__, **contents)
        assert files(folder_of_ranks) == files(folder / kind / "step_1"), case.__name__
        dist.barrier()

    case.__name__ = f"{how} {kind}"
    return case


KINDS = {
    "by rows": {},
    "whole": {},
    "lora": {"contents": ("adapter", "merged")},
    "dora": {"contents": ("adapter", "merged")},
    "nf4": {"contents": ("adapter", "merged")},
}


def conversions(kind: str) -> list[Any]:
    adapters = {"lora": [lora()], "dora": [lora(dora=True)]}
    if kind == "nf4":
        return [QuantizeBase(block_size=8), lora()]
    return [Int8Rows(by_rows=kind != "whole"), *adapters.get(kind, [])]


def test_sharded_over_two_ranks(tmp_path: Path) -> None:
    """FSDP and tensor parallelism load the bits, and write the files, of one process."""
    write_folder(tmp_path / "in", SHAPE, **SIZES)
    for kind, contents in KINDS.items():
        torch.manual_seed(0)
        model = load(tmp_path / "in", *conversions(kind))
        drawn = ("lora_a.weight", "lora_b.weight", "magnitude")
        parameters = {name: p.detach().clone() for name, p in model.named_parameters() if not name.endswith(drawn)}
        torch.save(parameters, tmp_path / f"{kind}.pt")
        randomize_adapter(model)
        saved(model, tmp_path, kind, **contents)
    cases = [same_as_alone(how, kind, contents) for how in ("fsdp", "ours") for kind, contents in KINDS.items()]
    ranks.run(2, cases, tmp_path)


class Wrong(Int8Rows):
    """Returns the weight as it is."""

    def from_full(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: tensor}


def test_tensors_that_are_not_those_of_the_parameters(tmp_path: Path) -> None:
    write_folder(tmp_path / "in", SHAPE, **SIZES)
    with pytest.raises(ConversionError) as caught:
        load(tmp_path / "in", Wrong())
    message = str(caught.value)
    assert "from_full('layers.0." in message
    assert "of Wrong returned" in message
    assert "torch.int8 [" in message
