"""How long a save holds training up: written at once, or copied and written behind training's back.

    python benchmarks/bench_save.py                        # one process, 135M parameters
    python benchmarks/bench_save.py --ranks 2 --layers 8   # FSDP over two gloo processes

The model has the sizes of SmolLM2-135M, random weights in float32 and AdamW's two moments: 12 bytes a parameter are
saved. ``at once`` is the time that ``save`` takes, files synced to the disk. ``behind`` is the time until ``save``
returns while the copy is written by a thread; before the next one the writing is waited for, and not counted.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torchtune.models import build, spec_for_architecture
from torchtune.training import FullModelHFCheckpointer

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def measure(rank: int, args: argparse.Namespace, folder: Path) -> None:
    """Save ``repeats`` times each way; rank 0 prints one line of JSON."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.ranks))
    if args.ranks > 1:
        dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=args.ranks)
    spec = spec_for_architecture("LlamaForCausalLM")
    model = build(spec.from_hf_config({**CONFIG, "num_hidden_layers": args.layers}), spec)
    if args.ranks > 1:
        mesh = init_device_mesh("cpu", (args.ranks,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    state = {"optimizer": optimizer, "progress": {"step": 1}}
    store = FullModelHFCheckpointer(str(folder / "in"), output_dir=str(folder / "out"), keep_last_n_checkpoints=1)
    seconds: dict[str, list[float]] = {"at once": [], "behind": [], "behind, written after": []}
    # The first save of each kind makes folders and buffers, as the first of a run does; the later ones are the rule.
    for step in range(2 * args.repeats + 2):
        behind = step % 2 == 1
        start = time.perf_counter()
        store.save(f"step_{step}", model, state=state, async_save=behind)
        seconds["behind" if behind else "at once"].append(time.perf_counter() - start)
        store.close()
        if behind:
            seconds["behind, written after"].append(time.perf_counter() - start)
    if rank == 0:
        print(seconds)
        medians = {kind: statistics.median(found[1:]) for kind, found in seconds.items()}
        print(
            json.dumps(
                {
                    "ranks": args.ranks,
                    "MB": round(12e-6 * sum(parameter.numel() for parameter in model.parameters())),
                    **{kind: round(median, 3) for kind, median in medians.items()},
                    "first behind": round(seconds["behind"][0], 3),
                    "held up": f"{medians['behind'] / medians['at once']:.1%}",
                }
            )
        )
    if args.ranks > 1:
        dist.destroy_process_group()


def main() -> None:
    """Read the arguments and start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", help="on the disk to be measured; a temporary folder by default")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        if args.ranks == 1:
            measure(0, args, folder)
        else:
            torch.multiprocessing.spawn(measure, (args, folder), nprocs=args.ranks)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
