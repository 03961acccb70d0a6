"""Measure one case of the GPU benchmark in this process; run_gpu.py runs all of them (make gpu).

    python benchmarks/bench_gpu.py llama-8b-lora ours
    python benchmarks/bench_gpu.py llama-8b-lora transformers --steps 20
    python benchmarks/bench_gpu.py llama-8b-lora ours --tiny      # the same code, even on a CPU, to see that it runs

Weights are random, which changes no speed; nothing is downloaded. A step is one batch of packs, filled with documents
of about a quarter of a pack and labeled throughout: forward, backward, AdamW, in bf16. Both sides see the same tokens.
Ours keeps documents apart and steps the optimizer as recipes do by default; the loop over transformers treats a pack as
one causal row, the fastest thing that a transformers model does without further kernels. A step of GRPO samples answers
with the weights that it trains, and trains on them with made-up advantages.

Each stage prints a line ``RESULT {json}`` when it is done: steps as they are ("eager"), the host's waits and kernel
time by kind of layer, then the same steps compiled. Times are medians. "mfu" counts only the operations that cannot be
left out (gpu_cases.needed_flops), for both sides alike, relative to the peak of dense bf16 products.
"""

import argparse
import json
import resource
import signal
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from gpu_cases import CASES, Case, draw_step, needed_flops
from gpu_profile import host_syncs, time_by_kind
from gpu_sides import SIDES, build_ours

EAGER_STEPS = 3
GIB = 2**30


def report(**stage: Any) -> None:
    """Print the results of a stage."""
    print("RESULT " + json.dumps(stage), flush=True)


class Clock:
    """Times calls on a device.

    Args:
        device: that the calls use.
    """

    def __init__(self, device: torch.device) -> None:
        self.wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)

    def __call__(self, function: Callable[[], Any]) -> tuple[float, Any]:
        """Seconds of a call, and its result."""
        self.wait()
        start = time.perf_counter()
        out = function()
        self.wait()
        return time.perf_counter() - start, out


def peak_gib(device: torch.device) -> dict[str, float]:
    """Peak of allocated and reserved device memory since the last reset; on a CPU, that of the process."""
    if device.type == "cpu":
        return {"peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    found = {
        "peak_gib": torch.cuda.max_memory_allocated() / GIB,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
    }
    torch.cuda.reset_peak_memory_stats()
    return found


def run_steps(steps: Any, case: Case, first: int, warmup: int, count: int) -> tuple[dict[str, float], list[float]]:
    """Run ``warmup + count`` steps; returns medians of the last ``count``, and the seconds of their training.

    Raises:
        SystemExit: the loss is not finite.
    """
    clock = Clock(steps.device)
    drawing, training, warm = [], [], 0.0
    for index in range(first, first + warmup + count):
        drawn, batches = clock(lambda index=index: steps.batches(index))
        trained, loss = clock(lambda batches=batches: steps.train(batches))
        if index < first + warmup:
            warm += drawn + trained
            if index == first + warmup - 1:
                peak_gib(steps.device)
            continue
        drawing.append(drawn)
        training.append(trained)
    if not torch.isfinite(loss):
        raise SystemExit(f"the loss is {loss.item()}.")
    train = statistics.median(training)
    found = {"train_seconds": train, "warmup_seconds": warm, "loss": loss.item(), **peak_gib(steps.device)}
    if case.answers is not None:
        found["generate_seconds"] = statistics.median(drawing)
        found["generated_per_second"] = case.answers.prompts * case.answers.samples * case.answers.new
        found["generated_per_second"] /= found["generate_seconds"]
        train += found["generate_seconds"]
    return {"tokens_per_second": case.tokens / train, **found}, training


def mfu(case: Case, tiny: bool, first: int, seconds: list[float], peak_flops: float) -> float:
    """Median share of the device's peak in steps ``first``, ``first + 1``, … which took so long."""
    model = build_ours(case, tiny, torch.device("meta"))
    d = model.description
    batches = (draw_step(case, d.vocab_size, first + index) for index in range(len(seconds)))
    rates = [needed_flops(d, model, case.lora, batch) / time for batch, time in zip(batches, seconds, strict=True)]
    return statistics.median(rates) / peak_flops


def bf16_tflops(device: torch.device) -> float | None:
    """Published peak of dense bf16 products, if known here."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else ""
    return 989.0 if "H100" in name or "H200" in name else None


def main() -> None:
    """Parse, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("--steps", type=int, default=10, help="timed steps, compiled")
    parser.add_argument("--warmup", type=int, default=4, help="steps before them, compilation included")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="default: not with --tiny")
    parser.add_argument("--precision", default="stochastic_rounding", help="our optimizer_precision")
    parser.add_argument("--peak-tflops", type=float, help="of dense bf16 products; known of H100 and H200")
    parser.add_argument("--seconds", type=int, help="end the process after this time")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, also without a GPU, only to try it")
    arguments = parser.parse_args()
    if arguments.seconds:
        signal.alarm(arguments.seconds)
    if not arguments.tiny and not torch.cuda.is_available():
        raise SystemExit("There is no CUDA device: use --tiny to try this on a CPU.")
    measure(arguments)


def measure(arguments: argparse.Namespace) -> None:
    """Measure the stages of a case, and report each."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    case = CASES[arguments.case].shrunk() if arguments.tiny else CASES[arguments.case]
    clock = Clock(device)
    built, steps = clock(lambda: SIDES[arguments.side](case, arguments.tiny, device, arguments.precision))
    trained = sum(p.numel() for p in steps.model.parameters() if p.requires_grad)
    report(parameters=sum(p.numel() for p in steps.model.parameters()), trained=trained, build_seconds=built)
    report(eager=run_steps(steps, case, 0, 2, EAGER_STEPS)[0])
    if arguments.side == "ours":
        drawn: list[Any] = []
        drawing = host_syncs(lambda: drawn.extend(steps.batches(100)))
        report(host_syncs=host_syncs(lambda: steps.train(drawn)), host_syncs_sampling=drawing)
        again = steps.batches(101)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report(kernels_ms=time_by_kind(lambda: steps.train(again), steps.optimizer, steps.layer_kinds()))
    compiled = not arguments.tiny if arguments.compile is None else arguments.compile
    if compiled and case.answers is None:
        steps.compile()
        found, seconds = run_steps(steps, case, 200, arguments.warmup, arguments.steps)
        if (peak := arguments.peak_tflops or bf16_tflops(device)) is not None:
            first = 200 + arguments.warmup
            found["mfu"] = mfu(case, arguments.tiny, first, seconds, peak * 1e12)
        report(compiled=found)


if __name__ == "__main__":
    sys.exit(main())
