"""How long a step takes: every operator as fast as either its arithmetic or its memory traffic allows.

Williams et al. 2009, "Roofline", doi:10.1145/1498765.1498785. Collectives are bound by the slowest link of a ring
(all-gather and reduce-scatter of ``n`` bytes over ``r`` ranks move ``n (r - 1) / r`` through every rank, all-reduce
twice that). In an all-to-all every rank sends ``n / r`` to each other one, at the same time over the links of its
machine and over the network. What FSDP sends overlaps with computation; other collectives do not.
"""

from collections import Counter
from dataclasses import dataclass

import torch

from torchtune.training.simulate._devices import Accelerator
from torchtune.training.simulate._observer import Observer, Traffic, Work

# Shares of the published peaks that large kernels and messages reach.
ARITHMETIC, MEMORY, LINKS = 0.7, 0.85, 0.8
# Seconds that the host takes to start an operator, and a collective to begin.
LAUNCH, LATENCY = 6e-6, 20e-6
# Bytes a second to host memory: PCIe 4 with 16 lanes, one way. Newer links of some devices are twice as fast.
HOST_LINK = 32e9


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step.

    Attributes:
        computing: kernels, one after another.
        launching: the host, which runs ahead of the device where it is faster.
        overlapped: collectives of FSDP.
        waiting: all other collectives.
        hosted: copies to host memory and back, beside the computation.
    """

    computing: float
    launching: float
    overlapped: float
    waiting: float
    hosted: float = 0.0

    @property
    def total(self) -> float:
        """Of the whole step."""
        return max(self.computing, self.launching, self.overlapped, self.hosted) + self.waiting

    @property
    def bound(self) -> str:
        """What takes longest."""
        parts = {"computation": self.computing, "the host": self.launching, "FSDP's collectives": self.overlapped}
        parts["copies to host memory and back"] = self.hosted
        return max(parts, key=parts.__getitem__)


def step_time(observer: Observer, device: Accelerator) -> StepTime:
    """Predict the time of the last whole step."""
    works = [work for (step, _), work in observer.work.items() if step == observer.step]
    computing = sum(_compute(work, device) for work in works)
    operators = sum(sum(work.calls.values()) for work in works)
    overlapped = sum(_send(work.traffic, device) for work in works)
    waiting = sum(_send(work.waiting, device) for work in works)
    hosted = sum(work.hosted for work in works) / (HOST_LINK * LINKS)
    return StepTime(computing, operators * LAUNCH, overlapped, waiting, hosted)


def _compute(work: Work, device: Accelerator) -> float:
    seconds = 0.0
    for (flops, moved, dtype), calls in work.calls.items():
        peak = device.fp32 * 1e12 if dtype in (torch.float32, torch.float64) else device.bf16
        peak = device.float8 if dtype.itemsize == 1 else peak
        slowest = max(flops / (peak * ARITHMETIC), moved / (device.bandwidth * 1e9 * MEMORY))
        seconds += calls * slowest
    return seconds


def _send(traffic: Traffic, device: Accelerator) -> float:
    seconds = 0.0
    for (kind, ranks), (calls, size) in traffic.items():
        if kind == "all-to-all":
            seconds += calls * LATENCY + size * _seconds_of_a_byte_to_all(ranks, device) / (1e9 * LINKS)
            continue
        share = (len(ranks) - 1) / len(ranks)
        rounds = 2 if kind == "all-reduce" else 1
        seconds += calls * LATENCY + rounds * size * share / (_link(ranks, device) * 1e9 * LINKS)
    return seconds


def _seconds_of_a_byte_to_all(ranks: tuple[int, ...], device: Accelerator) -> float:
    """Seconds times 1e9 for each byte that a rank divides among all ranks, over the slower of its two ways."""
    near = min(_by_machine(ranks, device))
    return max((near - 1) / device.link, (len(ranks) - near) / device.network) / len(ranks)


def _link(ranks: tuple[int, ...], device: Accelerator) -> float:
    """GB/s of the slowest link of a ring over these ranks; a machine's ranks share their ways to the network."""
    machines = _by_machine(ranks, device)
    if len(machines) == 1:
        return device.link
    return min(device.link, device.network * min(machines))


def _by_machine(ranks: tuple[int, ...], device: Accelerator) -> list[int]:
    """How many of the ranks every machine has that has one."""
    return list(Counter(rank // device.per_machine for rank in ranks).values())
