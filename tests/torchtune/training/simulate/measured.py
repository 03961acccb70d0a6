"""Run a recipe for two steps on fake or on real tensors, and report what the observer counted.

``python -m tests.torchtune.training.simulate.measured FOLDER`` measures the cases of several processes with real ones,
and writes what rank 0 counted to ``FOLDER/measured.json``.
"""

import json
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.recipes.runs import load_recipe, write_config
from torchtune.config import load_and_check
from torchtune.training.simulate._observer import Observer
from torchtune.training.simulate._simulate import simulate

FULL, LORA = "full_finetune_single_device", "lora_finetune_single_device"
FULL_MANY, LORA_MANY = "full_finetune_distributed", "lora_finetune_distributed"
BF16 = {"dtype": "bf16"}
# name -> (processes, recipe, settings)
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "full fp32": (1, FULL, {}),
    "masters, accumulated, clipped": (
        1,
        FULL,
        {**BF16, "optimizer_precision": "fp32_master", "gradient_accumulation_steps": 2, "clip_grad_norm": 1.0},
    ),
    "checkpointed": (1, FULL, {**BF16, "enable_activation_checkpointing": True}),
    "in backward": (1, FULL, {**BF16, "optimizer_in_bwd": True}),
    "lora": (1, LORA, {**BF16, "batch_size": 1}),
    "fsdp, checkpointed": (2, FULL_MANY, {**BF16, "enable_activation_checkpointing": True}),
    "tp lora": (2, LORA_MANY, {**BF16, "tensor_parallel_dim": 2}),
    "fsdp x cp": (4, FULL_MANY, {**BF16, "context_parallel_dim": 2, "gradient_accumulation_steps": 2}),
    "hsdp x tp": (4, FULL_MANY, {**BF16, "data_parallel_replicate_dim": 2, "tensor_parallel_dim": 2}),
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


def prepare(folder: Path) -> None:
    """Write what describes the model: there are neither weights nor data."""
    (folder / "checkpoint").mkdir()
    (folder / "checkpoint" / "config.json").write_text(json.dumps(LLAMA))


def measure(name: str, folder: Path, *, fake: bool) -> dict[str, Any]:
    """Peaks by phase in bytes, and of every step and phase FLOPs and collectives (calls and bytes)."""
    processes, recipe, settings = CASES[name]
    main = load_recipe(recipe, folder).recipe_main
    config = write_config(recipe, folder, folder / "never", **settings)
    observer = Observer(fake=fake)
    simulate(main, load_and_check(config, [], main), processes, observer=observer)
    flops, traffic = {}, {}
    for (step, phase), work in observer.work.items():
        key = f"{step} {phase}"
        flops[key] = sum(work.flops.values())
        sent = [*work.traffic.items(), *work.waiting.items()]
        traffic[key] = sorted([kind, list(ranks), *counts] for (kind, ranks), counts in sent if kind != "broadcast")
    peaks = {phase: peak.total for phase, peak in observer.ledger.peaks().items()}
    return {"peaks": peaks, "flops": flops, "traffic": traffic}


def environments(ranks: int) -> list[dict[str, str]]:
    """What torchrun would tell each of them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{key: str(value) for key, value in {**shared, "RANK": n, "LOCAL_RANK": n}.items()} for n in range(ranks)]


def main(folder: Path) -> None:
    """Fork as many ranks as each case has; this process runs no tensor operation, so that a fork is safe."""
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401  (imported here so that children need not)

    found = {}
    for processes in (2, 4):
        names = [name for name, case in CASES.items() if case[0] == processes]
        told = {name: environments(processes) for name in names}  # a port for each
        pids = []
        for rank in range(processes):
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    counted = {}
                    for name in names:
                        os.environ.update(told[name][rank])
                        counted[name] = measure(name, folder, fake=False)
                    if rank == 0:
                        (folder / "counted.json").write_text(json.dumps(counted))
                    status = 0
                except BaseException:  # noqa: BLE001  (whatever it is, the child must end here and say so)
                    traceback.print_exc()
                finally:
                    os._exit(status)
            pids.append(pid)
        if any(os.waitpid(pid, 0)[1] for pid in pids):
            raise SystemExit(f"{names} failed")
        found |= json.loads((folder / "counted.json").read_text())
    (folder / "measured.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
