"""Run a recipe for two steps on fake or on real tensors, and report what the observer counted.

Each of several ranks calls ``main(folder)``, and rank 0 writes what it counted to ``folder/measured_<processes>.json``.
"""

import json
import os
from pathlib import Path
from typing import Any

from tests.recipes.runs import load_recipe, write_config
from tests.tiny_images import qwen3_vl_config
from tests.torchtune.checkpoints.small import SIZES
from torchtune.config import load_and_check
from torchtune.estimate._ledger import highest_by_phase
from torchtune.estimate._observer import Observer
from torchtune.estimate._simulate import simulate

FULL = "full_finetune_single_device"
LORA = "lora_finetune_single_device"
FULL_MANY = "full_finetune_distributed"
LORA_MANY = "lora_finetune_distributed"
BF16 = {"dtype": "bf16"}
QLORA_BASE = {"_component_": "torchtune.modules.low_precision.QuantizeBase", "block_size": 32}
LORA_ADAPTER = {"_component_": "torchtune.modules.peft.LoRA", "rank": 4, "alpha": 8}
FLOAT8 = {
    "_component_": "torchtune.modules.low_precision.Float8Training",
    "emulate": True,  # real ones are on a CPU
}
# name -> (processes, recipe, settings)
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "full fp32": (1, FULL, {}),
    "masters, accumulated, clipped": (
        1,
        FULL,
        {**BF16, "optimizer_precision": "fp32_master", "gradient_accumulation_steps": 2, "clip_grad_norm": 1.0},
    ),
    "in backward": (1, FULL, {**BF16, "optimizer_in_bwd": True}),
    "qlora": (1, LORA, {**BF16, "batch_size": 1, "model_converters": [QLORA_BASE, LORA_ADAPTER]}),
    "fsdp, checkpointed": (2, FULL_MANY, {**BF16, "enable_activation_checkpointing": True}),
    "float8, fsdp": (2, FULL_MANY, {**BF16, "model_converters": [FLOAT8]}),
    "tp lora": (2, LORA_MANY, {**BF16, "tensor_parallel_dim": 2}),
    "cp": (2, FULL_MANY, {**BF16, "context_parallel_dim": 2, "gradient_accumulation_steps": 2}),
    "images": (1, FULL, {"model__checkpoint_dir": "images"}),
    "images, fsdp": (2, FULL_MANY, {"model__checkpoint_dir": "images"}),
    "hsdp x tp": (4, FULL_MANY, {**BF16, "data_parallel_replicate_dim": 2, "tensor_parallel_dim": 2}),
}
LLAMA = {
    **SIZES,
    "architectures": ["LlamaForCausalLM"],
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def prepare(folder: Path) -> None:
    """Write what describes the model: there are neither weights nor data."""
    (folder / "checkpoint").mkdir()
    (folder / "checkpoint" / "config.json").write_text(json.dumps(LLAMA))
    (folder / "images").mkdir()
    images = {**qwen3_vl_config().to_dict(), "architectures": ["Qwen3VLForConditionalGeneration"]}
    (folder / "images" / "config.json").write_text(json.dumps(images))


def measure(name: str, folder: Path, *, fake: bool) -> dict[str, Any]:
    """Peaks by phase in bytes, and of every step and phase FLOPs and collectives (calls and bytes)."""
    processes, recipe, settings = CASES[name]
    if model := settings.get("model__checkpoint_dir"):
        settings = {**settings, "model__checkpoint_dir": str(folder / model)}
    main = load_recipe(recipe, folder).recipe_main
    config = write_config(recipe, folder, folder / "never", **settings)
    observer = Observer(fake=fake)
    simulate(main, load_and_check(config, [], main), processes, observer=observer, steps=2)
    flops = {}
    traffic = {}
    for (step, phase), work in observer.work.items():
        key = f"{step} {phase}"
        flops[key] = sum(work.flops.values())
        sent = work.collectives + work.waiting
        sizes = work.sent + work.awaited
        kinds = [item for item in sent if item[0] != "broadcast"]
        traffic[key] = sorted([kind, list(ranks), sent[kind, ranks], sizes[kind, ranks]] for kind, ranks in kinds)
    peaks = {phase: peak.total for phase, peak in highest_by_phase(observer.ledger.peaks()).items()}
    return {"peaks": peaks, "flops": flops, "traffic": traffic}


def main(folder: Path) -> None:
    """Be one rank of every case of ``names.json`` of so many; rank 0 writes what it counted."""
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    processes = int(os.environ["WORLD_SIZE"])
    rank_folder = (
        folder / f"rank_{rank}_of_{processes}"
    )  # ranks write their configs, and must not read half of another's
    rank_folder.mkdir()
    prepare(rank_folder)
    os.environ.update(MASTER_ADDR="-", MASTER_PORT="0")
    measured = {}
    for name in [name for name in json.loads((folder / "names.json").read_text()) if CASES[name][0] == processes]:
        dist.init_process_group("gloo", f"file://{folder}/{processes} {name}", rank=rank, world_size=processes)
        measured[name] = measure(name, rank_folder, fake=False)
    if rank == 0:
        (folder / f"measured_{processes}.json").write_text(json.dumps(measured))
