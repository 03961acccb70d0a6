"""Two processes that share the weights against one process with two threads, on the same global batch.

    python benchmarks/bench_fsdp.py                    # SmolLM2-135M, full and LoRA, on two cores
    python benchmarks/bench_fsdp.py --tiny             # the same code on a tiny model, to see that it runs

Weights are random and nothing is downloaded. A step is 8 documents of 256 tokens, half of them labelled: forward,
backward, AdamW, in float32. Every side is a process group of its own; the figure is the median step after the warm-up.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import torch

from torchtune import training
from torchtune.data import BatchLoader, collate_documents
from torchtune.models import Description, build
from torchtune.models.smol import SPEC, smollm2_135m
from torchtune.modules.conversion import apply_conversions
from torchtune.modules.loss import LinearCrossEntropyLoss
from torchtune.modules.peft import LoRA

EXAMPLES, LENGTH = 8, 256


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


def measure(tiny: bool, lora: bool, steps: int) -> float:
    """Tokens per second of all processes."""
    device = torch.device("cpu")
    dims = training.ParallelDims.start(device, dp_shard=-1)
    torch.set_num_threads(2 // dims.world_size)
    model = _model(tiny, lora, dims, device)
    loss_fn = LinearCrossEntropyLoss()
    loss_fn.set_model_output(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=True)
    tokens = torch.randint(0, 512, (LENGTH,), generator=torch.Generator().manual_seed(0))
    labels = tokens.roll(-1).masked_fill(torch.arange(LENGTH) < LENGTH // 2, -100)
    loader = BatchLoader(
        [{"tokens": tokens, "labels": labels}] * (EXAMPLES * steps),
        batch_size=EXAMPLES // dims.data_size,
        collate_fn=dims.collate(collate_documents),
        shuffle=False,
        seed=0,
        rank=dims.data_rank,
        world_size=dims.data_size,
    )
    seconds = []
    for (batch,) in loader:
        start = time.perf_counter()
        targets = batch.pop("labels")
        count = int((targets != -100).sum())
        (total,) = dims.sum(count)
        (loss_fn(model(**batch), targets) * (count / total)).backward()
        optimizer.step()
        optimizer.zero_grad()
        dims.any(False)
        seconds.append(time.perf_counter() - start)
    rate = EXAMPLES * LENGTH / statistics.median(seconds[2:])
    if dims.is_main:
        print(json.dumps({"tokens_per_second": rate}), flush=True)
    dims.close()
    return rate


def _start(processes: int, arguments: list[str]) -> float:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if processes > 1 else []
    threads = {"OMP_NUM_THREADS": str(2 // processes), "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(
        [sys.executable, *launcher, __file__, "--worker", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, **threads},
    )
    return json.loads(done.stdout.splitlines()[-1])["tokens_per_second"]


def main() -> None:
    """Measure both sides of both methods, turn about."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--lora", action="store_true", help="adapters only")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    if args.worker:
        measure(args.tiny, args.lora, args.steps)
        return
    for method in ("--lora",) if args.lora else ("", "--lora"):
        arguments = [word for word in (method, "--tiny" * args.tiny, "--steps", str(args.steps)) if word]
        rates = [[_start(processes, arguments) for processes in (1, 2)] for _ in range(args.rounds)]
        one, two = (max(column) for column in zip(*rates, strict=True))
        name = "LoRA" if method else "full"
        print(f"{name}: one process {one:,.0f} tokens/s, two {two:,.0f}: {two / one:.0%}", flush=True)


if __name__ == "__main__":
    main()
