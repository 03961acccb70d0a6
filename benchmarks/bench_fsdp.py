"""Two processes that share the weights against one process with two threads, on the same global batch.

    python benchmarks/bench_fsdp.py                    # SmolLM2-135M, full and LoRA, on two cores
    python benchmarks/bench_fsdp.py --tiny             # the same code on a tiny model, to see that it runs

Weights are random and nothing is downloaded. A step is 8 documents of 256 tokens, half of them labelled: forward,
backward, AdamW, in float32. The two sides take turns, step by step, so that both see the same moods of the machine; the
figures are medians, and the ratio of each turn.
"""

import argparse
import json
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


def _side(tiny: bool, lora: bool, dims: training.ParallelDims) -> Callable[[], float]:
    """A step of these processes, which returns its seconds."""
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

    def step() -> float:
        torch.set_num_threads(THREADS // dims.world_size)
        start = time.perf_counter()
        ((batch,),) = loader
        targets = batch.pop("labels")
        count = int((targets != -100).sum())
        (total,) = dims.sum(count)
        (loss_fn(model(**batch), targets) * (count / total)).backward()
        optimizer.step()
        optimizer.zero_grad()
        dims.any(False)
        return time.perf_counter() - start

    return step


def measure(tiny: bool, lora: bool, steps: int) -> None:
    """Steps of both sides in turns, in two processes; prints the tokens per second of each."""
    dims = training.ParallelDims.start(torch.device("cpu"), dp_shard=-1)
    together = _side(tiny, lora, dims)
    alone = _side(tiny, lora, training.ParallelDims()) if dims.is_main else None
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(steps):
        if alone is not None:
            seconds[0].append(alone())
        dims.any(False)  # the second process sleeps until here
        seconds[1].append(together())
    if dims.is_main:
        rates = [EXAMPLES * LENGTH / statistics.median(side[1:]) for side in seconds]
        ratios = [one / two for one, two in zip(seconds[0][1:], seconds[1][1:], strict=True)]
        print(json.dumps({"rates": rates, "ratios": ratios}), flush=True)
    dims.close()


def main() -> None:
    """Measure both methods."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--method", choices=("full", "lora"), help="only this one")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=4, help="of each side, the first of which is left out")
    args = parser.parse_args()
    if args.worker:
        measure(args.tiny, args.method == "lora", args.steps)
        return
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    for method in [args.method] if args.method else ["full", "lora"]:
        line = [*launcher, "--worker", "--method", method, "--steps", str(args.steps), *["--tiny"] * args.tiny]
        threads = {"OMP_NUM_THREADS": str(THREADS), "OMP_WAIT_POLICY": "PASSIVE"}
        done = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **threads})
        found = json.loads(done.stdout.splitlines()[-1])
        (one, two), ratios = found["rates"], [f"{ratio:.0%}" for ratio in sorted(found["ratios"])]
        print(f"{method}: one process {one:,.0f} tokens/s, two {two:,.0f}: {two / one:.0%} ({', '.join(ratios)})")


if __name__ == "__main__":
    main()
