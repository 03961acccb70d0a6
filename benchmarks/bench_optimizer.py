"""Time of an optimizer step of bf16 weights, side by side with torch's fused step, which rounds to nearest.

    python benchmarks/bench_optimizer.py [--layers 30 --dim 576 --rounds 5 --device cpu]

Variants: torch's fused AdamW; ``stochastic_rounding`` uncompiled, and compiled as a run does it once its steps have
taken as long as a compiler would; ``fp32_master``. Rounds are interleaved and the fastest counts: CPU time of the
process on CPU, wall time on CUDA. The default shapes are those of a model of 135M parameters.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import nn

from torchtune.training import prepare_optimizer
from torchtune.training.optim import _rounded_step

VOCABULARY = 49152


def make_model(layers: int, dim: int, device: torch.device) -> nn.ParameterList:
    """Return the parameters of a decoder with grouped-query attention, with gradients."""
    torch.manual_seed(0)
    shapes: list[tuple[int, ...]] = [(VOCABULARY, dim), (dim,)]
    for _ in range(layers):
        hidden = 8 * dim // 3
        shapes += [(dim, dim), (dim // 3, dim), (dim // 3, dim), (dim, dim), (dim,), (dim,)]
        shapes += [(hidden, dim), (hidden, dim), (dim, hidden)]
    parameters = []
    for shape in shapes:
        parameter = nn.Parameter((torch.randn(shape, device=device) * 0.02).bfloat16())
        parameter.grad = torch.randn_like(parameter) * 1e-3
        parameters.append(parameter)
    return nn.ParameterList(parameters)


def make_step(variant: str, model: nn.ParameterList) -> Callable[[], None]:
    """Return a function that takes a step of a variant."""
    if variant == "torch":
        return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True).step
    precision = variant.partition(" ")[0]
    optimizer = prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-5), model, precision, seed=0)
    # The function is shared by all optimizers of a process: each variant has its own here.
    seconds = 0.0 if variant.endswith("compiled") and not variant.endswith("uncompiled") else float("inf")
    function = _rounded_step.CompiledWhenItPays(_rounded_step.step_elements, seconds)

    def step() -> None:
        _rounded_step.fused_step = function
        optimizer.step()

    return step


def seconds_of(step: Callable[[], None], device: torch.device) -> float:
    """Return the time of one step."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        step()
        torch.cuda.synchronize(device)
        return time.perf_counter() - start
    start = time.process_time()
    step()
    return time.process_time() - start


def main() -> None:
    """Time all variants and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--dim", type=int, default=576)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    device = torch.device(args.device)
    variants = ["torch", "stochastic_rounding uncompiled", "stochastic_rounding compiled", "fp32_master"]
    steps = {variant: make_step(variant, make_model(args.layers, args.dim, device)) for variant in variants}
    for step in steps.values():  # makes the states, and compiles
        step()
        step()
    fastest = dict.fromkeys(variants, float("inf"))
    for _ in range(args.rounds):
        for variant, step in steps.items():
            fastest[variant] = min(fastest[variant], seconds_of(step, device))
    print(f"{'variant':<34}{'ms':>8}{'x torch':>9}")
    for variant, seconds in fastest.items():
        print(f"{variant:<34}{seconds * 1e3:>8.0f}{seconds / fastest['torch']:>9.2f}")


if __name__ == "__main__":
    main()
