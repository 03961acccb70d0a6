"""Host memory while loading and saving: the model and one shard, never the model twice."""

import json
import sys
from pathlib import Path

import pytest
import torch

from tests.recipes.killing import launch
from tests.torchtune.checkpoints.small import SIZES
from torchtune.checkpoints._export import write_entries
from torchtune.checkpoints._safetensors_file import Entry, TensorSlice
from torchtune.models import build, spec_for_architecture

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
    config = {
        **SIZES,
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 4096,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 3,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
    }
    folder = tmp_path_factory.mktemp("source")
    (folder / "config.json").write_text(json.dumps(config))
    spec = spec_for_architecture("LlamaForCausalLM")
    description = spec.from_hf_config(config)
    with torch.device("meta"):
        shapes = {name: parameter.detach() for name, parameter in build(description, spec).named_parameters()}
    filling = torch.randn(4096, 1024)

    def part(group):
        meta = group.to_external([shapes[name] for name in group.tune])
        specs = dict(zip(group.external, meta, strict=True))
        return Entry(
            specs,
            lambda: [
                TensorSlice.of(name, filling.reshape(-1)[: t.numel()].reshape(t.shape)) for name, t in specs.items()
            ],
            meta[0].itemsize,
        )

    write_entries([part(group) for group in spec.weight_map("hf").groups(description)], folder, SHARD)
    assert len(list(folder.glob("model-*.safetensors"))) >= 5
    return folder


@pytest.fixture(scope="module")
def measured(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every rank of every way measured, a file each."""
    output = tmp_path_factory.mktemp("measured")
    (output / "measure.json").write_text(json.dumps([str(folder), SHARD, WAYS]))
    launch("checkpoints.measured_load", 1, output)
    return output


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize(("how", "size"), WAYS.items())
def test_its_share_of_the_model_and_little_more(measured, how, size):
    """One process: the model and one shard. A rank: what it holds and one tensor."""
    for rank in range(size):
        found = json.loads((measured / f"{how}_{rank}.json").read_text())
        assert found["model"] > 160 / size
        # To merge, ranks put the weight together and add to it: it, its parts on the way, and the sum.
        room = {stage: SHARD if size == 1 else TENSOR * (3 if stage == "merged" else 1) for stage in STAGES}
        bound = found["before"] + found["model"] + SLACK
        over = {stage: round(found[stage] - bound - room[stage] / MIB) for stage in STAGES if stage in found}
        assert max(over.values()) <= 0, f"MiB above its share and what it may hold besides: {over} of {found}"
