"""Roofline model of step time: every operator is bound by its arithmetic or by its memory traffic.

See Williams et al. 2009, "Roofline", doi:10.1145/1498765.1498785. Ring collectives are bound by their slowest link:
all-gather and reduce-scatter of ``n`` bytes over ``r`` ranks move ``n (r - 1) / r`` through every rank, all-reduce
moves twice as many. In an all-to-all, every rank sends ``n / r`` to each other rank, over the links of its machine and
over the network at the same time. FSDP's collectives overlap with computation; others do not.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from torchtune.estimate._devices import Accelerator
from torchtune.estimate._observer import Collective, Work

# Fractions of the published peaks that large kernels and messages reach.
ARITHMETIC = 0.7
MEMORY = 0.85
LINKS = 0.8
# Seconds of host time per operator launch.
LAUNCH = 6e-6
# Seconds from the start of a collective to its first byte.
LATENCY = 20e-6
# Bytes per second to host memory: PCIe 4 x16, one way. Newer links of some devices are twice as fast.
HOST_LINK = 32e9


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step.

    Attributes:
        computing: time of all kernels.
        launching: host time of all launches, which overlaps with kernels.
        overlapped: time of FSDP's collectives.
        waiting: time of all other collectives.
        hosted: time of copies to and from host memory, which overlap with kernels.
    """

    computing: float
    launching: float
    overlapped: float
    waiting: float
    hosted: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return max(self.computing, self.launching, self.overlapped, self.hosted) + self.waiting

    @property
    def bound(self) -> str:
        """Name of the bottleneck."""
        parts = {"computation": self.computing, "the host": self.launching, "FSDP's collectives": self.overlapped}
        parts["copies to host memory and back"] = self.hosted
        return max(parts, key=parts.__getitem__)


def step_time(phases: Iterable[Work], device: Accelerator) -> StepTime:
    """Predict the time of a step from the work of its phases."""
    works = list(phases)
    computing = sum(_compute(work, device) for work in works)
    operators = sum(sum(work.calls.values()) for work in works)
    overlapped = sum(_send(work.collectives, work.sent, device) for work in works)
    waiting = sum(_send(work.waiting, work.awaited, device) for work in works)
    hosted = sum(sum(work.hosted.values()) for work in works) / (HOST_LINK * LINKS)
    return StepTime(computing, operators * LAUNCH, overlapped, waiting, hosted)


def _compute(work: Work, device: Accelerator) -> float:
    """Return the seconds of the operators of a phase, each bound by its arithmetic or its memory traffic."""
    seconds = 0.0
    for (flops, moved, dtype), calls in work.calls.items():
        if dtype.itemsize == 1:
            peak = device.float8
        elif dtype in (torch.float32, torch.float64):
            peak = device.fp32 * 1e12
        else:
            peak = device.bf16
        arithmetic = flops / (peak * ARITHMETIC)
        traffic = moved / (device.bandwidth * 1e9 * MEMORY)
        seconds += calls * max(arithmetic, traffic)
    return seconds


def _send(collectives: Counter[Collective], sizes: Counter[Collective], device: Accelerator) -> float:
    """Return the seconds of collectives, of which ``sizes`` are the bytes."""
    seconds = 0.0
    for (kind, ranks), calls in collectives.items():
        size = sizes[kind, ranks]
        if kind == "all-to-all":
            seconds += calls * LATENCY + size * _seconds_of_a_byte_to_all(ranks, device) / (1e9 * LINKS)
            continue
        share = (len(ranks) - 1) / len(ranks)  # of the bytes, which move through every rank of a ring
        rounds = 2 if kind == "all-reduce" else 1  # a reduce-scatter and an all-gather
        seconds += calls * LATENCY + rounds * size * share / (_link(ranks, device) * 1e9 * LINKS)
    return seconds


def _seconds_of_a_byte_to_all(ranks: tuple[int, ...], device: Accelerator) -> float:
    """Return 1e9 times the seconds per byte of an all-to-all, over the slower of links and network."""
    near = min(_by_machine(ranks, device))  # ranks of the machine that has most to send to others
    over_links = (near - 1) / device.link
    over_network = (len(ranks) - near) / device.network
    return max(over_links, over_network) / len(ranks)


def _link(ranks: tuple[int, ...], device: Accelerator) -> float:
    """Return the GB/s of the slowest link in a ring over ``ranks``; ranks of a machine share its network links."""
    machines = _by_machine(ranks, device)
    if len(machines) == 1:
        return device.link
    return min(device.link, device.network * min(machines))


def _by_machine(ranks: tuple[int, ...], device: Accelerator) -> list[int]:
    """Return the number of ``ranks`` on each machine that has any."""
    return list(Counter(rank // device.per_machine for rank in ranks).values())
