"""Accelerators, and the roofline model of step time: every operator is bound by its arithmetic or its memory traffic.

See Williams et al. 2009, "Roofline", doi:10.1145/1498765.1498785. Ring collectives are bound by their slowest link:
all-gather and reduce-scatter of ``n`` bytes over ``r`` ranks move ``n (r - 1) / r`` through every rank, all-reduce
moves twice as many. In an all-to-all, every rank sends ``n / r`` to each other rank, over the links of its machine and
over the network at the same time. FSDP's collectives overlap with computation; others do not.
"""

import difflib
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from torchtune.estimate._observer import Collective, Work
from torchtune.supervision import peak_flops
from torchtune.utils import UserError

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


class DeviceNameError(UserError):
    """Invalid device, or invalid number of devices."""


@dataclass(frozen=True)
class Accelerator:
    """A device and its links.

    Attributes:
        name: name in the table.
        memory: GiB that torch can allocate; less than the nominal size, which is decimal or partly reserved.
        bandwidth: memory bandwidth in GB/s.
        fp32: peak TFLOP/s of float32 matrix products without tensor cores (torch's default for float32).
        link: one-way bandwidth to devices of the same machine, in GB/s.
        network: one-way bandwidth to other machines per device, in GB/s.
        per_machine: devices per machine.
        multiplies_float8: whether the device has float8 matrix products; otherwise float32 emulates them.
    """

    name: str
    memory: float
    bandwidth: float
    fp32: float
    link: float
    network: float
    per_machine: int = 8
    multiplies_float8: bool = True

    @property
    def bf16(self) -> float:
        """Dense bf16 peak in FLOP/s."""
        return peak_flops(self.name)

    @property
    def float8(self) -> float:
        """Dense float8 peak in FLOP/s with float32 accumulation: twice the bf16 peak if supported."""
        if not self.multiplies_float8:
            return self.fp32 * 1e12
        return 2 * self.bf16


# SXM or OAM variants where several exist. Network per device: 400 Gbit/s, 200 for A100, 100 for PCIe cards.
# Columns: name, memory, bandwidth, fp32, link, network.
_TABLE = (
    Accelerator("H100", 79.1, 3350, 67.0, 450, 50),
    Accelerator("H200", 139.8, 4800, 67.0, 450, 50),
    Accelerator("B200", 178.4, 8000, 80.0, 900, 50),
    Accelerator("A100", 79.2, 2039, 19.5, 300, 25, multiplies_float8=False),
    Accelerator("L40S", 44.4, 864, 91.6, 32, 12.5),
    Accelerator("RTX 4090", 23.5, 1008, 82.6, 32, 12.5),
    Accelerator("RTX 5090", 31.4, 1792, 104.8, 64, 12.5),
    Accelerator("MI300X", 191.7, 5300, 163.4, 448, 50),
)


def _lookup_key(name: str) -> str:
    """Return the letters and digits of a name: ``RTX 4090``, ``rtx-4090`` and ``RTX4090`` are the same device."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


_BY_NAME = {_lookup_key(device.name): device for device in _TABLE}
_BY_NAME["4090"] = _BY_NAME["rtx4090"]
_BY_NAME["5090"] = _BY_NAME["rtx5090"]


def parse_cluster(text: str) -> tuple[int, Accelerator]:
    """Parse ``"64xH100"`` or ``"H100"`` into (number of devices, device).

    Raises:
        DeviceNameError: the device is unknown or the text is malformed; the message suggests the nearest names.

    Example:
        >>> processes, device = torchtune.estimate.parse_cluster("64xH100")
        >>> processes, device.name, device.per_machine
        (64, 'H100', 8)
    """
    match = re.fullmatch(r"(?:(?P<number>\d+)\s*[x*]\s*)?(?P<name>.+)", text.strip(), re.IGNORECASE)
    if match is None or (match["number"] is not None and int(match["number"]) < 1):
        raise DeviceNameError(f"--simulate {text}: give a number of devices and their name, for example 8xH100.")
    key = _lookup_key(match["name"])
    if key in _BY_NAME:
        return int(match["number"] or 1), _BY_NAME[key]

    # Names are shown as they can be typed in a shell, without spaces.
    all_names = ", ".join(device.name.replace(" ", "") for device in _TABLE)
    nearest_names = []
    for nearest_key in difflib.get_close_matches(key, _BY_NAME, n=2, cutoff=0.5):
        nearest_names.append(_BY_NAME[nearest_key].name.replace(" ", ""))
    hint = f"the table has {all_names}."
    if nearest_names:
        hint = f"did you mean {' or '.join(nearest_names)}? The table has {all_names}."
    raise DeviceNameError(f"--simulate {text}: the device '{match['name']}' is not known: {hint}")


def parse_memory(text: str) -> float:
    """Parse ``"80GiB"``, ``"80GB"`` or ``"80"`` (GiB) into bytes.

    Raises:
        DeviceNameError: the text is malformed.

    Example:
        >>> torchtune.estimate.parse_memory("80GB"), torchtune.estimate.parse_memory("1GiB")
        (80000000000.0, 1073741824.0)
    """
    match = re.fullmatch(r"(?P<size>\d+(?:\.\d+)?)\s*(?P<unit>gib|gb|g|)", text.strip().lower())
    if match is None or float(match["size"]) == 0:
        raise DeviceNameError(f"--fit {text}: give the memory of a device, for example 80GiB.")
    size = float(match["size"])
    if match["unit"] == "gb":
        return size * 1e9
    return size * 2**30


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
        gigabytes = sizes[kind, ranks] / 1e9
        ranks_by_machine = Counter(rank // device.per_machine for rank in ranks)
        # Ranks of the machine that has fewest: it sends most to others, over the fewest links of the network.
        fewest = min(ranks_by_machine.values())
        if kind == "all-to-all":
            # Links and network send at the same time, and the slower one counts.
            over_links = (fewest - 1) / device.link
            over_network = (len(ranks) - fewest) / device.network
            transfer = gigabytes * max(over_links, over_network) / len(ranks)
        else:
            slowest_link = device.link
            if len(ranks_by_machine) > 1:  # a ring between machines has all network links of a machine's ranks
                slowest_link = min(device.link, device.network * fewest)
            share = (len(ranks) - 1) / len(ranks)  # of the bytes, which move through every rank of a ring
            rounds = 2 if kind == "all-reduce" else 1  # a reduce-scatter and an all-gather
            transfer = rounds * gigabytes * share / slowest_link
        seconds += calls * LATENCY + transfer / LINKS
    return seconds
