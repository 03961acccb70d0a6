"""The gated delta rule and Mamba 2, forward and backward, beside the fallbacks of ``transformers`` in plain torch.

    python benchmarks/bench_delta_rule.py              # 2,048 tokens, 16 key and 32 value heads of 128 (delta rule)
    python benchmarks/bench_delta_rule.py --tiny       # the same code on few tokens, to see that it runs

Both sides take turns on the same random inputs. The figures are medians of their seconds, the median ratio of a turn,
and the most memory that a side has allocated beyond its inputs.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import mamba2_chunk_scan
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from torchtune.modules.mixers._gated_delta_net import gated_delta_rule
from torchtune.modules.mixers._mamba2 import state_space

KEY_HEADS, VALUE_HEADS, SIZE = 16, 32, 128
MAMBA_HEADS, MAMBA_SIZE, DECAYS = 64, 64, torch.linspace(-16, -1, 64)  # one group, as in Granite 4-H
Side = Callable[..., torch.Tensor]


def _ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    resets = torch.zeros(q.shape[:2], dtype=torch.bool)
    return gated_delta_rule(q, k, v, g, beta, resets)[0]


def _theirs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    q, k = (t.repeat_interleave(VALUE_HEADS // KEY_HEADS, dim=2) for t in (q, k))
    return torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]


def _inputs(tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    q, k = (torch.randn(1, tokens, KEY_HEADS, SIZE, dtype=dtype) for _ in range(2))
    v = torch.randn(1, tokens, VALUE_HEADS, SIZE, dtype=dtype)
    g, beta = -torch.rand(1, tokens, VALUE_HEADS), torch.rand(1, tokens, VALUE_HEADS).to(dtype)
    return [tensor.requires_grad_() for tensor in (q, k, v, g, beta)]


def _our_mamba(c: torch.Tensor, b: torch.Tensor, x: torch.Tensor, dt: torch.Tensor) -> torch.Tensor:
    return state_space(c, b, x, DECAYS * dt, dt, torch.zeros(x.shape[:2], dtype=torch.bool))[0]


def _their_mamba(c: torch.Tensor, b: torch.Tensor, x: torch.Tensor, dt: torch.Tensor) -> torch.Tensor:
    return mamba2_chunk_scan(x, dt, DECAYS, b, c, chunk_size=256)


def _mamba_inputs(tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    c, b = (torch.randn(1, tokens, 1, SIZE, dtype=dtype) for _ in range(2))
    x, dt = torch.randn(1, tokens, MAMBA_HEADS, MAMBA_SIZE, dtype=dtype), torch.rand(1, tokens, MAMBA_HEADS) / 10
    return [tensor.requires_grad_() for tensor in (c, b, x, dt)]


def _step(side: Side, inputs: list[torch.Tensor]) -> tuple[float, list[torch.Tensor]]:
    start = time.perf_counter()
    out = side(*inputs)
    gradients = torch.autograd.grad(out.float().sum(), inputs)
    return time.perf_counter() - start, [out.detach(), *gradients]


def _peak_mib(side: Side, inputs: list[torch.Tensor]) -> float:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as traced:
        _step(side, inputs)
    held = most = 0
    for event in traced.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most / 2**20


def main() -> None:
    """Compare both sides in float32 and bfloat16."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    kinds = {"delta rule": (_inputs, _ours, _theirs), "Mamba 2": (_mamba_inputs, _our_mamba, _their_mamba)}
    for (name, (make, own, other)), dtype in itertools.product(kinds.items(), (torch.float32, torch.bfloat16)):
        inputs = make(128 if args.tiny else 2048, dtype)
        (_, ours), (_, theirs) = _step(own, inputs), _step(other, inputs)
        apart = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True))
        turns = [(_step(own, inputs)[0], _step(other, inputs)[0]) for _ in range(args.turns)]
        first, second = (statistics.median(side) for side in zip(*turns, strict=True))
        ratio = statistics.median(b / a for a, b in turns)
        print(
            f"{name}, {dtype}: {first:.2f} s, transformers {second:.2f} s, ratio {ratio:.2f}; largest relative "
            f"difference {apart:.1e}; peak {_peak_mib(own, inputs):,.0f} MiB, transformers "
            f"{_peak_mib(other, inputs):,.0f} MiB"
        )


if __name__ == "__main__":
    main()
