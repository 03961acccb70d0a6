"""A layer of experts: tokens sorted by expert, against every expert on every token.

    python benchmarks/bench_moe.py              # 512 tokens, width 512, experts of 192; on a GPU in bfloat16
    python benchmarks/bench_moe.py --tiny       # the same code on a small layer, to see that it runs

A turn is a forward and a backward pass. ``sorted`` is what models use, ``kernel`` the same through torch's
``F.grouped_mm``, ``all`` multiplies every token with every expert and throws most of it away, ``dense`` is one
feed-forward layer as wide as the chosen experts together. Operations are those of matrix products in the forward pass,
as torch's profiler counts them. The ways take turns; times are medians.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtune.modules import FeedForward
from torchtune.modules.kernels.grouped import RowGroups, grouped_mm
from torchtune.modules.moe import GroupedExperts, MoE, TokenChoiceTopKRouter


class _Kernel(GroupedExperts):
    """Experts whose products torch's grouped kernel makes."""

    def project(self, name: str, x: Tensor, groups: RowGroups, weights: Mapping[str, Any] | None = None) -> Tensor:
        """As the base does, by the kernel."""
        return grouped_mm(x, getattr(self, name), groups, kernel=True)


class _All(MoE):
    """A mixture that computes every expert."""

    def forward(self, x: Tensor) -> Tensor:
        """``[b, s, d]`` to ``[b, s, d]``."""
        tokens, e = x.flatten(0, 1), self.experts
        scores, selected, _ = self.router(tokens)
        weights = torch.zeros(len(tokens), e.num_experts, dtype=x.dtype, device=x.device)
        weights = weights.scatter(1, selected, scores.to(x.dtype))
        hidden = F.silu(tokens @ e.gate_proj) * (tokens @ e.up_proj)
        return torch.einsum("te,etd->td", weights, hidden @ e.down_proj).view_as(x)


def _layer(kind: str, dim: int, hidden: int, experts: int, k: int) -> nn.Module:
    if kind == "dense":
        sizes = {"gate_proj": (dim, k * hidden), "down_proj": (k * hidden, dim), "up_proj": (dim, k * hidden)}
        return FeedForward(**{name: nn.Linear(*size, bias=False) for name, size in sizes.items()})
    gate = nn.Linear(dim, experts, bias=False)
    router = TokenChoiceTopKRouter(gate=gate, dim=dim, num_experts=experts, experts_per_token=k, normalize=True)
    stacked = (_Kernel if kind == "kernel" else GroupedExperts)(dim=dim, hidden_dim=hidden, num_experts=experts)
    return (_All if kind == "all" else MoE)(experts=stacked, router=router)


def _turn(layer: nn.Module, x: Tensor) -> None:
    layer.zero_grad(set_to_none=True)
    layer(x).sum().backward()
    if x.is_cuda:
        torch.cuda.synchronize()


def _seconds(turn: Callable[[], None]) -> float:
    start = time.perf_counter()
    turn()
    return time.perf_counter() - start


def _operations(layer: nn.Module, x: Tensor) -> int:
    with torch.no_grad(), torch.profiler.profile(with_flops=True) as profile:
        layer(x)
    return sum(event.flops for event in profile.events() if event.name in ("aten::mm", "aten::bmm"))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--turns", type=int, default=7)
    arguments = parser.parse_args()
    tokens, dim, hidden, k = (64, 32, 16, 2) if arguments.tiny else (512, 512, 192, 4)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    print("experts  way     GFLOP forward   ms")
    for experts in (8, 16) if arguments.tiny else (8, 32, 128):
        torch.manual_seed(0)
        x = torch.randn(1, tokens, dim, device=device, dtype=dtype, requires_grad=True)
        layers = {kind: _layer(kind, dim, hidden, experts, k) for kind in ("dense", "sorted", "kernel", "all")}
        layers = {kind: layer.to(device, dtype) for kind, layer in layers.items()}
        times: dict[str, list[float]] = {kind: [] for kind in layers}
        for _ in range(arguments.turns + 1):  # the first does not count
            for kind, layer in layers.items():
                times[kind].append(_seconds(partial(_turn, layer, x)))
        for kind, layer in layers.items():
            operations = f"{_operations(layer, x) / 1e9:.3f}" if kind != "kernel" else "-"
            print(f"{experts:7}  {kind:6}  {operations:>13}  {1e3 * statistics.median(times[kind][1:]):6.1f}")


if __name__ == "__main__":
    main()
