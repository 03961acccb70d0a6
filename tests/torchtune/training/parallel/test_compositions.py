"""Every composition trains as one process does on the same global batch: losses, norms and gradients."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.killing import launch
from tests.tiny import write_checkpoint
from tests.torchtune.checkpoints.small import write_folder
from tests.torchtune.models.families import FAMILIES

ROOT = Path(__file__).parents[4]

# (processes, sizes of the mesh, settings of the run, options of parallelize)
_SHARED = {"source": "shared keys"}  # its sharp attention magnifies rounding from step to step
CASES = {
    "fsdp": (4, {"dp_shard": 4}, {}, {}),
    "fsdp keeps layers": (2, {"dp_shard": 2}, {"accumulation": 1}, {"reshard_after_forward": False}),
    "fsdp untied, output apart": (2, {"dp_shard": 2}, {"tied": False}, {"custom_sharded_layers": ["output"]}),
    "fsdp lora": (2, {"dp_shard": 2}, {"adapter": "lora"}, {}),
    "fsdp dora": (2, {"dp_shard": 2}, {"adapter": "dora"}, {}),
    "hsdp": (4, {"dp_replicate": 2, "dp_shard": 2}, {}, {}),
    "replicate lora": (2, {"dp_replicate": 2}, {"adapter": "lora"}, {}),
    "fsdp x tp": (4, {"dp_shard": 2, "tp": 2}, {"checkpointing": True, "accumulation": 2}, {}),
    "fsdp x tp lora": (4, {"dp_shard": 2, "tp": 2}, {"adapter": "lora"}, {}),
    "fsdp x cp packed": (4, {"dp_shard": 2, "cp": 2}, {"packed": True}, {}),
    "hsdp over cp": (4, {"dp_replicate": 2, "cp": 2}, {}, {}),
    "cp": (4, {"cp": 4}, {"packed": True}, {}),
    "cp x tp": (4, {"cp": 2, "tp": 2}, {}, {}),
    "copies x tp": (4, {"dp_replicate": 2, "tp": 2}, {}, {}),
    "tp": (2, {"tp": 2}, {}, {}),
    "fsdp experts": (2, {"dp_shard": 2}, {"source": "experts", "accumulation": 2, "checkpointing": True}, {}),
    "ep": (2, {"dp_shard": 2, "ep": 2}, {"source": "experts", "accumulation": 2, "checkpointing": True}, {}),
    "ep x cp": (2, {"cp": 2, "ep": 2}, {"source": "biased experts", "packed": True}, {}),
    "fsdp x ep": (4, {"dp_shard": 4, "ep": 2}, {"source": "experts", "checkpointing": True}, {}),
    "hsdp x ep lora": (4, {"dp_replicate": 2, "dp_shard": 2, "ep": 2}, {"source": "experts", "adapter": "lora"}, {}),
    # One step: weights that differ by rounding may lie on either side of a tie of the grid.
    "fsdp quantization-aware": (2, {"dp_shard": 2}, {"adapter": "qat", "steps": 1}, {}),
    "fsdp shared keys": (2, {"dp_shard": 2}, {**_SHARED, "accumulation": 2, "checkpointing": True}, {}),
    "cp shared keys": (2, {"cp": 2}, {**_SHARED, "packed": True}, {}),
    "ep beside mlp": (2, {"dp_shard": 2, "ep": 2}, {"source": "experts beside mlp"}, {}),
    "fsdp x cp linear attention": (4, {"dp_shard": 2, "cp": 2}, {"source": "linear attention", "packed": True}, {}),
    "cp linear attention lora": (2, {"cp": 2}, {"source": "linear attention", "adapter": "lora"}, {}),
    "cp mamba": (2, {"cp": 2}, {"source": "mamba", "packed": True, "checkpointing": True}, {}),
    "cp mamba beside attention": (2, {"cp": 2}, {"source": "mamba beside attention"}, {}),
    "cp convolutions": (2, {"cp": 2}, {"source": "convolutions", "packed": True}, {}),
    "cp latent attention": (2, {"cp": 2}, {"source": "latent attention", "packed": True}, {}),
    "fsdp x tp linear attention": (4, {"dp_shard": 2, "tp": 2}, {"source": "linear attention", "packed": True}, {}),
    "cp x tp linear attention lora": (4, {"cp": 2, "tp": 2}, {"source": "linear attention", "adapter": "lora"}, {}),
    "tp mamba beside attention": (2, {"tp": 2}, {"source": "mamba beside attention", "checkpointing": True}, {}),
    "tp convolutions": (2, {"tp": 2}, {"source": "convolutions", "packed": True}, {}),
    "tp latent attention": (2, {"tp": 2}, {"source": "latent attention", "packed": True}, {}),
    "cp x tp latent attention lora": (4, {"cp": 2, "tp": 2}, {"source": "latent attention", "adapter": "lora"}, {}),
    "tp experts": (2, {"tp": 2}, {"source": "experts", "accumulation": 2, "checkpointing": True}, {}),
    "tp x ep": (2, {"tp": 2, "ep": 2}, {"source": "experts", "packed": True}, {}),
    "fsdp x tp x ep": (4, {"dp_shard": 2, "tp": 2, "ep": 4}, {"source": "experts"}, {}),
    "fsdp x tp x ep lora": (4, {"dp_shard": 2, "tp": 2, "ep": 2}, {"source": "experts", "adapter": "lora"}, {}),
    "hsdp x tp mamba": (4, {"dp_replicate": 2, "tp": 2}, {"source": "mamba"}, {}),
    "fsdp accumulates": (2, {"dp_shard": 2}, {"accumulation": 2, "checkpointing": True}, {}),
}
# Checkpoint -> its architecture, in the sizes of the tests of its family.
_DELTA_NET = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 12}
_DELTA_NET |= {"linear_key_head_dim": 8, "head_dim": 16, "initializer_range": 0.08}
_DELTA_NET |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_LATENTS = {**FAMILIES["deepseek_v3"][1], "num_key_value_heads": 4}
WITH_STATES: dict[str, tuple[str, dict[str, Any]]] = {
    "linear attention": ("Qwen3_5", _DELTA_NET),
    "mamba": FAMILIES["nemotron_h"],
    "mamba beside attention": FAMILIES["falcon_h1"],
    "convolutions": FAMILIES["lfm2"],
    "latent attention": ("DeepseekV3", _LATENTS),
}
# These train to the end of an epoch, where ranks are without work; the others for two steps.
WHOLE_EPOCH = ("fsdp", "fsdp x cp packed", "tp", "ep", "fsdp accumulates")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compositions")
    for tied in (True, False):
        write_checkpoint(folder / f"tied_{tied}", tied=tied)
    write_folder(folder / "experts", "qwen3_moe")
    write_folder(folder / "biased experts", "gpt_oss")
    write_folder(folder / "shared keys", "gemma4_shared_keys")
    write_folder(folder / "experts beside mlp", "gemma4_experts")
    for name, shape in WITH_STATES.items():
        write_folder(folder / name, shape)
    return folder


@pytest.fixture(scope="module")
def outcomes(folder):
    """Largest relative differences of every case."""
    outcomes_of_all: dict[str, Any] = {}
    for processes in (2, 4):
        cases = {}
        for name, (size, sizes, settings, options) in CASES.items():
            if size == processes:
                steps = {} if name in WHOLE_EPOCH else {"steps": 2}
                cases[name] = (sizes, {**steps, **settings}, options)
        (folder / f"cases_{processes}.json").write_text(json.dumps(cases))
        launch("training.parallel.worker", processes, folder)
        outcomes_of_all |= json.loads((folder / f"outcomes_{processes}.json").read_text())
    return outcomes_of_all


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_composition_trains_as_one_process_does(outcomes, name):
    outcome = outcomes[name]
    assert outcome["loss"] < 1e-5
    assert outcome["norm"] < 1e-4  # up to 1.5e-5 of rounding in "cp shared keys", by the processor
    assert outcome["gradient"] < 1e-4  # of the largest element of a tensor
    assert outcome["missing"] == 0
