"""Host memory while loading and saving: the model and one shard, never the model twice."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.torchtune.training.checkpointing.small import SIZES
from torchtune.models import build, spec_for_architecture
from torchtune.training.checkpointing._export import write_parts
from torchtune.training.checkpointing._safetensors_file import whole_blocks

ROOT = Path(__file__).parents[4]
MIB = 2**20
SHARD = 40 * MIB
# Allocators round up, modules are imported late, and one tensor (here at most 16 MiB) is in flight.
SLACK = 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """About 300 MiB in float32, in shards of 40 MiB."""
    config = {
        **SIZES,
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 4096,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 6,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
    }
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    spec = spec_for_architecture("LlamaForCausalLM")
    description = spec.from_hf_config(config)
    with torch.device("meta"):
        shapes = {name: parameter.detach() for name, parameter in build(description, spec).named_parameters()}
    filling = torch.randn(4096, 1024)

    def part(group):
        meta = group.to_external([shapes[name] for name in group.tune])
        outline = dict(zip(group.external, meta, strict=True))
        return outline, lambda: whole_blocks(
            (name, filling.reshape(-1)[: t.numel()].reshape(t.shape)) for name, t in outline.items()
        )

    write_parts([part(group) for group in spec.weight_map("hf").groups(description)], folder, SHARD)
    assert len(list(folder.glob("model-*.safetensors"))) >= 5
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_model_and_one_shard(folder: Path, tmp_path: Path) -> None:
    program = "tests.torchtune.training.checkpointing.measured_load"
    done = subprocess.run(
        [sys.executable, "-m", program, str(folder), str(tmp_path / "output"), str(SHARD)],
        cwd=ROOT,
        # glibc would keep up to 64 MiB of what was freed
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1048576"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["model"] > 250
    bound = found["before"] + found["model"] + SHARD / MIB + SLACK
    over = {stage: round(found[stage] - bound) for stage in ("loaded", "saved", "merged", "one file")}
    assert max(over.values()) <= 0, f"MiB above model + one shard: {over} of {found}"
