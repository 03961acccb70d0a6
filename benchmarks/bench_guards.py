"""What looking after a run costs, as a share of its steps.

    python benchmarks/bench_guards.py
    python benchmarks/bench_guards.py --step 0.05 --repeats 20000

Each guard is measured by itself, without the work that it guards: ``accounting`` is all that a step calls of
``Throughput`` (a batch handed on, a forward pass noticed, the step, a save and a validation, the metrics); ``watchdog``
the CPU time of its two threads, which look at the run and show its heartbeat to the others once a second (the store's
server, which is rank 0's alone, included); ``steps`` what decides whether the optimizer takes a step, on one
process. The last column is the cost of a step that takes ``--step`` seconds, as a share of it. ``norm`` is the norm of
the gradients that is computed for that decision where none is clipped: its share is of a real step of SmolLM2-135M (8
documents of 256 tokens, float32, all weights), and the other column is made of it.
"""

import argparse
import os
import socket
import time
from collections.abc import Callable

import torch
from torch.distributed import TCPStore

from torchtune.data import BatchLoader
from torchtune.models import Description, build
from torchtune.models.smol import SPEC, smollm2_135m
from torchtune.modules.loss import LinearCrossEntropyLoss
from torchtune.supervision import StepGuard, StepMetrics, Throughput, Watchdog
from torchtune.supervision._flops import FlopCount
from torchtune.supervision._heartbeats import Beat, Heartbeats
from torchtune.training import ParallelDims, clip_grad_norm_


class Nothing(torch.nn.Module):
    """A model that takes no time."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens


def accounting(args: argparse.Namespace) -> float:
    """Seconds by step of what the loop calls."""
    model, tokens = Nothing(), torch.zeros(2, 2048, dtype=torch.int64)
    throughput = Throughput(model=model, dims=ParallelDims())
    # As on a device whose peak is known.
    throughput._flops, throughput._peak_flops = FlopCount(1.0, 1.0, {None: 1.0}), 1.0
    batches = [{"tokens": tokens}]

    def bare() -> float:
        start = time.perf_counter()
        for _ in range(args.repeats):
            tokens.shape  # noqa: B018  (the loop's own cost)
        return time.perf_counter() - start

    def guarded() -> float:
        start = time.perf_counter()
        for _ in throughput.loading([batches] * args.repeats):
            throughput._on_forward(model, (tokens,), {})
            throughput.step(processed=4096, trained=100)
            throughput.metrics()
            with throughput.paused("validation"):
                pass
            with throughput.paused("saving"):
                pass
        return time.perf_counter() - start

    return (min(guarded() for _ in range(5)) - min(bare() for _ in range(5))) / args.repeats


def watchdog(args: argparse.Namespace) -> float:
    """CPU seconds by step of the threads that look after it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(free.getsockname()[1])
    server = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=True, wait_for_workers=False)
    throughput = Throughput()
    # Beats a second, to measure many. The timeout depends on it: with a short one, a busy machine counts as stalled.
    rate = 2 if args.tiny else 50
    started = time.process_time()
    with Watchdog(throughput.activity, ParallelDims(), timeout=20 / rate):
        beats = Heartbeats(0, 2, 1 / rate, 0, Beat())
        end = time.monotonic() + args.seconds
        while time.monotonic() < end:
            time.sleep(0.1)
            throughput.activity.move()
        beats.stop(1.0)
    del server
    idle = time.process_time()
    for _ in range(round(10 * args.seconds)):
        time.sleep(0.1)
        throughput.activity.move()
    cost = (idle - started) - (time.process_time() - idle)
    return cost / (rate * args.seconds) * args.step  # one beat a second


def bad_steps(args: argparse.Namespace) -> float:
    """Seconds by step of the decision whether it is taken."""
    loader = BatchLoader([0], batch_size=1, collate_fn=list, shuffle=False, seed=0)
    metrics = StepMetrics()
    guard = StepGuard(metrics, loader, ParallelDims(), ".", 10, spike_threshold=6.0)
    loss = torch.ones(())
    start = time.perf_counter()
    for step in range(args.repeats):
        metrics.add_loss(loss)
        guard.accepts(step, metrics.total(ParallelDims().exchange(metrics.sums_and_counts())[0]) | {"grad_norm": loss})
    return (time.perf_counter() - start) / args.repeats


def norm(args: argparse.Namespace) -> float:
    """The norm of all gradients, as a share of a real step times ``args.step``."""
    sizes = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 64, "intermediate_dim": 128}
    tiny = Description(vocab_size=512, max_seq_len=256, tie_word_embeddings=True, **sizes)
    torch.manual_seed(0)
    model = build(tiny, SPEC) if args.tiny else smollm2_135m()
    loss_fn = LinearCrossEntropyLoss()
    loss_fn.set_model_output(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    tokens = torch.randint(0, 512, (8, 256))
    whole, own = [], []
    for _ in range(2 if args.tiny else 5):
        start = time.perf_counter()
        loss_fn(model(tokens), tokens).backward()
        middle = time.perf_counter()
        clip_grad_norm_(model.parameters(), None).item()
        own.append(time.perf_counter() - middle)
        optimizer.step()
        optimizer.zero_grad()
        whole.append(time.perf_counter() - start)
    return min(own) / (min(whole) - min(own)) * args.step


GUARDS: dict[str, Callable[[argparse.Namespace], float]] = {
    "accounting": accounting,
    "watchdog": watchdog,
    "steps": bad_steps,
    "norm": norm,
}


def main() -> None:
    """Measure each, print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--step", type=float, default=0.05, help="seconds that a step takes")
    parser.add_argument("--repeats", type=int, default=5000)
    parser.add_argument("--seconds", type=float, default=10.0, help="for which threads are watched")
    parser.add_argument("--tiny", action="store_true", help="see that it runs")
    args = parser.parse_args()
    if args.tiny:
        args.repeats, args.seconds = 10, 0.2
    print(f"{'guard':<12}{'us by step':>12}{'share of step':>16}")
    for name, guard in GUARDS.items():
        seconds = guard(args)
        print(f"{name:<12}{1e6 * seconds:>12.2f}{seconds / args.step:>16.4%}")


if __name__ == "__main__":
    main()
