"""Loads and saves a model and prints the peak of its resident memory at every stage, in MiB.

The ranks are forked: their memory begins with what their parent has imported.
"""

import ctypes
import gc
import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

import torchtune
from tests.torchtune.checkpoints.ranks import shard
from torchtune._facade import load_to_save
from torchtune.checkpoints import FullModelHFCheckpointer
from torchtune.models import from_hf_config
from torchtune.modules.conversion import apply_conversions
from torchtune.modules.peft import LoRA
from torchtune.training.parallel._shards import my_shard

M_MMAP_THRESHOLD = -3  # of malloc.h


def status(field: str) -> float:
    """A size of ``/proc/self/status``, in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise KeyError(field)


def measure(folder: Path, output: Path, shard_bytes: int, how: str, rank: int, size: int) -> None:
    """Write resident memory before, and its peak after loading, saving, and saving merged; a file a rank."""
    with torch.device("meta"):
        model = from_hf_config(folder)
        if how != "tp":  # torch splits none but its own linear layers
            apply_conversions(model, [LoRA(rank=2, alpha=4, apply_to_mlp=True)])
    if size > 1:
        dist.init_process_group("gloo", f"file://{output}_store", rank=rank, world_size=size)
        shard(model, how)
    store = FullModelHFCheckpointer(folder, output_dir=output)
    gc.collect()
    memory = {"before": max(status("VmRSS"), status("VmHWM"))}
    store.load_model(model)
    held = [my_shard(parameter)[1] for parameter in model.parameters()]
    memory["model"] = sum(p.numel() * p.element_size() for p in held) / 2**20
    memory["loaded"] = status("VmHWM")
    model.requires_grad_(False)  # the base alone would lose a trained adapter, and is refused
    store.save("step_1", model, max_shard_bytes=shard_bytes)
    memory["saved"] = status("VmHWM")
    store.save("step_2", model)
    memory["one file"] = status("VmHWM")
    if how != "tp":
        store.save("step_3", model, contents=("adapter", "merged"), max_shard_bytes=shard_bytes)
        memory["merged"] = status("VmHWM")
    Path(f"{output}_{rank}.json").write_text(json.dumps(memory))
    if size > 1:
        dist.destroy_process_group()


def measure_export(adapter: Path, output: Path, how: str) -> None:
    """Write the peak of resident memory when an adapter is merged into its base, as ``tune export`` does."""
    gc.collect()
    memory = {"before": max(status("VmRSS"), status("VmHWM"))}
    torchtune.save(load_to_save(adapter), output / how, contents="merged")
    memory["merged"] = status("VmHWM")
    (output / f"{how}_0.json").write_text(json.dumps(memory))


def main(output: Path) -> None:
    """Measure each way, one after another, in as many ranks as it has."""
    folder, adapter, shard_bytes, ways = json.loads((output / "measure.json").read_text())
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20)  # glibc would keep up to 64 MiB of what was freed
    for how, size in [("export", 1), *ways.items()]:
        pids = []
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    if how == "export":
                        measure_export(Path(adapter), output, how)
                    else:
                        measure(Path(folder), output / how, shard_bytes, how, rank, size)
                    status = 0
                except BaseException:  # noqa: BLE001 - whatever it is, the child must end here and say so
                    traceback.print_exc()
                sys.stderr.flush()
                os._exit(status)
            pids.append(pid)
        for pid in pids:
            assert os.waitpid(pid, 0)[1] == 0, how
