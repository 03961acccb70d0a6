"""How long a save holds training up: written at once, or copied and written behind training's back.

    python benchmarks/bench_save.py                        # one process, 135M parameters
    python benchmarks/bench_save.py --ranks 2 --layers 16   # FSDP over two gloo processes
    python benchmarks/bench_save.py --device cuda --tokens 4096

The model has the sizes of SmolLM2-135M, random weights in float32 and AdamW's two moments: 12 bytes a parameter are
saved. ``at once`` is the time that ``save`` takes, files synced to the disk. ``behind`` is what the log says of an
asynchronous one: the time until ``save`` returns, and what the optimizer's next step then waits for the copy. ``step``
is a whole training step without a save, ``step beside a save`` the one that follows an asynchronous save (the save
included), while the copy is made and written.
"""

import argparse
import json
import logging
import os
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torchtune.checkpoints import FullModelHFCheckpointer
from torchtune.models import build, spec_for_architecture
from torchtune.utils import get_logger

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


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(rank: int, args: argparse.Namespace, folder: Path) -> None:
    """Save ``repeats`` times each way; rank 0 prints one line of JSON."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.ranks))
    if args.ranks > 1:
        dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=args.ranks)
    spec = spec_for_architecture("LlamaForCausalLM")
    model = build(spec.from_hf_config({**CONFIG, "num_hidden_layers": args.layers}), spec).to(args.device)
    if args.ranks > 1:
        mesh = init_device_mesh("cpu", (args.ranks,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(CONFIG["vocab_size"], (1, args.tokens), device=args.device)

    def step() -> None:
        model(tokens).logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if args.device != "cpu":
            torch.cuda.synchronize()

    state = {"optimizer": optimizer, "progress": {"step": 1}}
    store = FullModelHFCheckpointer(str(folder / "in"), output_dir=str(folder / "out"), keep_last_n_checkpoints=1)
    seconds: dict[str, list[float]] = {"at once": [], "behind": [], "step": [], "step beside a save": []}
    handler = logging.Handler()
    handler.emit = lambda record: seconds["behind"].extend(
        float(found) for found in re.findall(r"held training up for (\S+) s", record.getMessage())
    )
    get_logger("INFO").addHandler(handler)
    get_logger().propagate = False
    # The first save of each kind makes folders and buffers, as the first of a run does; the later ones are the rule.
    for number in range(args.repeats + 1):
        seconds["step"].append(_seconds(step))
        seconds["at once"].append(_seconds(partial(store.save, f"step_{2 * number}", model, state=state)))
        start = time.perf_counter()
        store.save(f"step_{2 * number + 1}", model, state=state, async_save=True)
        step()
        seconds["step beside a save"].append(time.perf_counter() - start)
        store.close()
    if rank == 0:
        medians = {kind: statistics.median(found[1:]) for kind, found in seconds.items()}
        size = 12e-6 * sum(parameter.numel() for parameter in model.parameters())
        found = {"ranks": args.ranks, "MB": round(size), **{kind: round(value, 3) for kind, value in medians.items()}}
        print(json.dumps({**found, "held up": f"{medians['behind'] / medians['at once']:.1%}"}))
    if args.ranks > 1:
        dist.destroy_process_group()


def main() -> None:
    """Read the arguments and start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--device", default="cpu", help="cpu (with any number of ranks) or cuda (with one)")
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
