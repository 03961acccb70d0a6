"""Sharded models in several processes: what is loaded and saved does not depend on how they are sharded."""

import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.devices import own_device
from tests.torchtune.checkpoints import ranks
from tests.torchtune.checkpoints.small import (
    build,
    load,
    randomize_adapter,
    resume,
    same_bits,
    started,
    stored,
    write_folder,
)
from torchtune.checkpoints import FullModelHFCheckpointer
from torchtune.modules.conversion import Conversion, ConversionError, StoredWeight, apply_conversions
from torchtune.modules.low_precision import FrozenInt8Linear, QuantizeBase
from torchtune.modules.peft import LoRA

SIZES = {"vocab_size": 322, "num_hidden_layers": 1}  # uneven: the last of four ranks has fewer rows


class Whole(QuantizeBase):
    """Needs all rows of a weight."""

    def stored_weights(self, model: nn.Module) -> dict[str, StoredWeight]:
        forms = super().stored_weights(model)
        return {name: dataclasses.replace(form, by_rows=False) for name, form in forms.items()}


BASES = {
    "whole": lambda: Whole("int8"),
    "int8": lambda: QuantizeBase("int8"),
    "nf4": lambda: QuantizeBase(block_size=8),
}


def conversions(adapter: str, shape: str) -> list[Conversion]:
    """By words: the base, and what is on it."""
    mlp = shape in ("qwen2", "qwen3_moe", "gemma4_experts")
    modules = ["q_proj"] if shape == "gemma4_experts" else ["q_proj", "v_proj"]
    base_conversions: list[Conversion] = [make() for name, make in BASES.items() if name in adapter]
    if "ora" in adapter:
        base_conversions.append(LoRA(2, 4, attn_modules=modules, apply_to_mlp=mlp, use_dora="dora" in adapter))
    return base_conversions


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def same_as_alone(how: str, shape: str, adapter: str, **options: Any) -> Callable[[Path], None]:
    """Load and save sharded: the values and the files of one process."""

    def case(folder: Path) -> None:
        source = folder / shape
        alone = folder / f"{shape} {adapter} {sorted(options)}"
        model = ranks.shard(build(source, *conversions(adapter, shape)), how, own_device())
        store = FullModelHFCheckpointer(source, output_dir=folder / f"{case.__name__} {dist.get_world_size()}")
        torch.manual_seed(4 + dist.get_rank())  # ranks draw as rank 0 does
        drawn = torch.rand(1).item()
        torch.manual_seed(4 + dist.get_rank())
        store.load_model(model, device=own_device())
        assert dist.get_rank() == 0 or torch.rand(1).item() == drawn
        expected = torch.load(alone / "model.pt")
        assert {name for name, _ in model.named_parameters()} == expected.keys()
        for name, parameter in model.named_parameters():
            assert torch.equal(ranks.whole(parameter), expected[name]), f"{case.__name__}: {name}"
        randomize_adapter(model)
        saved = store.save("step_1", model, **options)
        assert files(saved) == files(alone / "step_1"), case.__name__

    case.__name__ = f"{how} {shape} {adapter} {sorted(options)}"
    return case


KINDS: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "none", {}),
    ("qwen2_tied", "none", {"max_shard_bytes": 30_000}),
    ("llama", "lora", {"contents": ("adapter", "merged")}),
    ("llama", "dora", {"contents": ("adapter", "merged"), "max_shard_bytes": 40_000}),
    ("llama", "dora", {"contents": "adapter"}),
    ("qwen3_moe", "none", {"max_shard_bytes": 30_000}),
    ("qwen3_moe", "lora", {"contents": ("adapter", "merged")}),
    ("gemma4_experts", "lora", {"contents": ("adapter", "merged")}),
    # With biases, and rotary rows in another order than in files.
    ("qwen2", "whole", {}),
    ("qwen2", "int8 dora", {"contents": ("adapter", "merged")}),
    ("qwen2", "nf4 lora", {"contents": ("adapter", "merged")}),
]
# Numbers of KINDS for each mesh: on two ranks every kind on every mesh that can have it.
MESHES = {
    2: {"fsdp": range(11), "tp": (0, 1), "whole": range(5), "ours": (*range(5), 8, 9, 10)},
    4: {"fsdp": (1, 6), "hsdp": (2, 5), "tp": (1,), "fsdp_tp": (0,), "ours": (3,), "experts": (6, 7)},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources, and for each kind what one process makes of them."""
    folder = tmp_path_factory.mktemp("sharded")
    for shape in {shape for shape, _, _ in KINDS}:
        changes = {"layer_types": ["full_attention"]} if shape == "gemma4_experts" else {}
        write_folder(folder / shape, shape, max_shard_size="30KB", **SIZES, **changes)
    for shape, adapter, options in KINDS:
        alone = folder / f"{shape} {adapter} {sorted(options)}"
        torch.manual_seed(4)
        model = load(folder / shape, *conversions(adapter, shape))
        alone.mkdir()
        torch.save({name: parameter.detach() for name, parameter in model.named_parameters()}, alone / "model.pt")
        randomize_adapter(model)
        FullModelHFCheckpointer(folder / shape, output_dir=alone).save("step_1", model, **options)
        assert stored(alone / "step_1") or options.get("contents") == "adapter"
    return folder


@pytest.mark.parametrize("size", MESHES)
def test_any_mesh_reads_and_writes_the_same_files(folder, size):
    cases = []
    for how, numbers in MESHES[size].items():
        for shape, adapter, options in (KINDS[number] for number in numbers):
            cases.append(same_as_alone(how, shape, adapter, **options))
    ranks.run(size, cases, folder)


def one_writer_of_each_file(folder: Path) -> None:
    """What every process opens to write: no file of tensors is opened by two, and all have something to do."""
    opened: set[str] = set()

    def note(event: str, arguments: tuple) -> None:
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            opened.add(os.path.basename(str(arguments[0])))

    model = ranks.shard(build(folder / "llama"), "fsdp", own_device())
    store = FullModelHFCheckpointer(folder / "llama", output_dir=folder / "writers")
    store.load_model(model, device=own_device())
    state = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), "progress": {}}
    sys.addaudithook(note)
    for behind in (False, True):
        opened.clear()
        saved = store.save("step_1", model, state=state, max_shard_bytes=30_000, async_save=behind)
        store.close()
        files_of_ranks: list[set[str]] = [set()] * dist.get_world_size()
        dist.all_gather_object(files_of_ranks, {name for name in opened if name.endswith(".safetensors")})
        written = []
        for names in files_of_ranks:
            written += names
        written.sort()
        assert written == sorted(path.name for path in saved.rglob("*.safetensors"))
        assert len(written) > 2 * dist.get_world_size()
        for rank, names in enumerate(files_of_ranks):
            assert len([name for name in names if name.startswith("model-")]) >= 2, files_of_ranks
            assert f"rank_{rank}.safetensors" in names
        dist.barrier()


def test_each_file_is_written_by_one_rank(folder):
    ranks.run(2, [one_writer_of_each_file], folder)


def test_lora_of_the_builder_is_applied_again_around_a_conversion(source):
    """LoRA, which is there already, is undone and applied again; so it is, if another conversion comes in between."""
    model = build(source, LoRA(rank=4, alpha=8))
    apply_conversions(model, [QuantizeBase("int8")])
    assert isinstance(model.layers[0].attn.q_proj, FrozenInt8Linear)
    model.conversions[1].revert(model)
    assert type(model.layers[0].attn.q_proj) is FrozenInt8Linear
    assert not any("lora" in name for name, _ in model.named_parameters())


def test_quantized_full_run_resumes(source, tmp_path):
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


def test_conversion_with_other_tensors_than_its_parameters_is_refused(source):
    with pytest.raises(ConversionError, match=r"from_full\('layers.0.* of Wrong returned .*torch.int8 \["):
        load(source, Wrong("int8"))
