"""Two processes that share the weights against one process with two threads, on the same global batch.

    python benchmarks/bench_fsdp.py                    # SmolLM2-135M, full and LoRA, on two cores
    python benchmarks/bench_fsdp.py --tiny             # the same code on a tiny model, to see that it runs

Weights are random and nothing is downloaded. A step is 8 documents of 256 tokens, half of them labeled: forward,
backward, AdamW, in float32. The two sides take turns, step by step, so that both see the same moods of the machine; the
figures are medians, and the ratio of each turn. On a busy machine only tokens per core-second mean something: they
leave out what the sides wait for.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from torchtune import training
from torchtune.data import BatchLoader, collate_documents
from torchtune.models import Description, build
from torchtune.models.smol import SPEC, smollm2_135m
from torchtune.modules.conversion import apply_conversions
from torchtune.modules.loss import LinearCrossEntropyLoss
from torchtune.modules.peft import LoRA

EXAMPLES, LENGTH, THREADS = 8, 256, 2


def _model(tiny: bool, lora: bool, dims: training.ParallelDims, device: torch.device) -> torch.nn.Module:
    torch.manual_seed(0)
    with torch.device("meta"):
        model = smollm2_135m()
        if tiny:
            sizes = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 64, "intermediate_dim": 128}
            model = build(Description(vocab_size=512, max_seq_len=LENGTH, tie_word_embeddings=True, **sizes), SPEC)
        if lora:
            apply_conversions(model, [LoRA(rank=16, alpha=32, apply_to_mlp=True)])
    training.parallelize(model, dims, device=device)
    model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02)
    return model


def _side(tiny: bool, lora: bool, dims: training.ParallelDims) -> Callable[[], tuple[float, float]]:
    """A step of these processes, which returns its seconds, and those that all cores together worked."""
    device = torch.device("cpu")
    model = _model(tiny, lora, dims, device)
    loss_fn = LinearCrossEntropyLoss()
    loss_fn.set_model_output(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=True)
    tokens = torch.randint(0, 512, (LENGTH,), generator=torch.Generator().manual_seed(0))
    labels = tokens.roll(-1).masked_fill(torch.arange(LENGTH) < LENGTH // 2, -100)
    loader = BatchLoader(
        [{"tokens": tokens, "labels": labels}] * EXAMPLES,
        batch_size=EXAMPLES // dims.data_size,
        collate_fn=dims.collate(collate_documents),
        shuffle=False,
        seed=0,
        rank=dims.data_rank,
        world_size=dims.data_size,
    )

    def step() -> tuple[float, float]:
        torch.set_num_threads(THREADS // dims.world_size)
        start, worked = time.perf_counter(), time.process_time()
        ((batch,),) = loader
        targets = batch.pop("labels")
        count = int((targets != -100).sum())
        (total,) = dims.sum(count)
        (loss_fn(model(**batch), targets) * (count / total)).backward()
        optimizer.step()
        optimizer.zero_grad()
        (worked,) = dims.sum(time.process_time() - worked)
        return time.perf_counter() - start, worked

    return step


def measure(tiny: bool, lora: bool, steps: int) -> None:
    """Steps of both sides in turns, in two processes; prints the tokens per second of each."""
    dims = training.ParallelDims.start(torch.device("cpu"), dp_shard=-1)
    together = _side(tiny, lora, dims)
    alone = _side(tiny, lora, training.ParallelDims()) if dims.is_main else None
    seconds: tuple[list[tuple[float, float]], list[tuple[float, float]]] = ([], [])
    for _ in range(steps):
        if alone is not None:
            seconds[0].append(alone())
        dims.any(False)  # the second process sleeps until here
        seconds[1].append(together())
    if dims.is_main:
        for kind, name in enumerate(("second", "core-second")):
            taken = [[step[kind] for step in side[1:]] for side in seconds]
            one, two = (EXAMPLES * LENGTH / statistics.median(side) for side in taken)
            turns = ", ".join(f"{alone / both:.0%}" for alone, both in zip(*taken, strict=True))
            print(f"  tokens a {name}: one process {one:,.0f}, two {two:,.0f}: {two / one:.0%} (turns: {turns})")
    dims.close()


def main() -> None:
    """Measure both methods."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--method", choices=("full", "lora"), help="only this one")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=3, help="of each side, the first of which is left out")
    args = parser.parse_args()
    if args.worker:
        measure(args.tiny, args.method == "lora", args.steps)
        return
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    for method in [args.method] if args.method else ["full", "lora"]:
        line = [*launcher, "--worker", "--method", method, "--steps", str(args.steps), *["--tiny"] * args.tiny]
        threads = {"OMP_NUM_THREADS": str(THREADS), "OMP_WAIT_POLICY": "PASSIVE"}
        print(f"{method}:", flush=True)
        subprocess.run(line, check=True, env={**os.environ, **threads})


if __name__ == "__main__":
    main()
