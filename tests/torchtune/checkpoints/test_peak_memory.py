"""Host memory while loading and saving: the model and one shard, never the model twice."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import torchtune
from tests.recipes.killing import launch
from tests.torchtune.checkpoints.small import randomize_adapter, write_folder
from torchtune.modules.peft import LoRA

MIB = 2**20
SHARD = 40 * MIB
TENSOR = 16 * MIB  # the largest
# Allocators round up, modules are imported late, and one tensor is in flight.
SLACK = 20
STAGES = ("loaded", "saved", "one file", "merged")
WAYS = {"whole": 1, "fsdp": 2, "tp": 2}  # and their processes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 170 MiB in float32, in shards of 40 MiB."""
    widths = {"vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 3072}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4}
    folder = write_folder(tmp_path_factory.mktemp("source"), max_shard_size="40MB", **widths, **heads)
    assert len(list(folder.glob("model-*.safetensors"))) >= 5
    return folder


@pytest.fixture(scope="module")
def adapter(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the folder's model, and ``merged``, the model with the adapter, saved from memory."""
    model, _ = torchtune.load(folder, adapter=LoRA(rank=2, alpha=6, apply_to_mlp=True), device="cpu")
    randomize_adapter(model)
    output = tmp_path_factory.mktemp("adapter")
    torchtune.save(model, output / "merged", contents="merged")
    return torchtune.save(model, output / "adapter", contents="adapter")


@pytest.fixture(scope="module")
def measured(folder: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every rank of every way measured, a file each."""
    output = tmp_path_factory.mktemp("measured")
    (output / "measure.json").write_text(json.dumps([str(folder), str(adapter), SHARD, WAYS]))
    launch("checkpoints.measured_load", 1, output)
    return output


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize(("how", "size"), WAYS.items())
def test_peak_memory_is_the_shard_and_a_tensor(measured, how, size):
    """One process: the model and one shard. A rank: what it holds and one tensor."""
    for rank in range(size):
        memory = json.loads((measured / f"{how}_{rank}.json").read_text())
        assert memory["model"] > 160 / size
        for stage in STAGES:
            if stage not in memory:
                continue
            if size == 1:
                buffers = SHARD
            elif stage == "merged":  # the weight from all ranks, its parts on the way, and the sum with the adapter
                buffers = 3 * TENSOR
            else:
                buffers = TENSOR
            limit = memory["before"] + memory["model"] + SLACK + buffers / MIB
            assert round(memory[stage] - limit) <= 0, f"rank {rank}: {stage} needs more than {limit:.0f} MiB: {memory}"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_adapter_is_merged_for_an_export_without_the_model_in_memory(measured, adapter):
    """The weight, the product of the adapter and their sum, and pages of a shard that were read: half of the model."""
    memory = json.loads((measured / "export_0.json").read_text())
    assert memory["merged"] - memory["before"] < (3 * TENSOR + SHARD) / MIB, memory
    expected = load_file(adapter.parent / "merged" / "model.safetensors")
    exported = load_file(measured / "export" / "model.safetensors")
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in expected.items())
