"""Share of exposed communication in a profiler trace."""

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from torchtune.utils import write_json

# Kernels of NCCL, RCCL and torch's symmetric memory, and copies between devices.
_COMMUNICATION = re.compile(r"nccl|rccl|multimem_|one_shot_all|two_shot_all|Memcpy P(to|2)P", re.IGNORECASE)

Interval = tuple[float, float]


@dataclass(frozen=True)
class Overlap:
    """Shares of the time between the first and the last kernel.

    Attributes:
        seconds: length of that time.
        compute: share with at least one compute kernel.
        communication: share with at least one communication kernel.
        exposed: share with communication but no compute kernels.
        idle: share without kernels.
    """

    seconds: float
    compute: float
    communication: float
    exposed: float
    idle: float

    def __str__(self) -> str:
        return (
            f"{self.exposed:.1%} of the time is communication alone, {self.communication - self.exposed:.1%} is hidden "
            f"behind computation, {self.idle:.1%} is idle"
        )


def overlap_of(trace: str | Path) -> Overlap | None:
    """Compute the overlap from a Chrome trace of torch's profiler; None if it has no kernels.

    Args:
        trace: JSON file with ``traceEvents``; complete events (``ph`` X, in microseconds) of the categories ``kernel``
            and ``gpu_memcpy`` count.
    """
    with open(trace, encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    compute: list[Interval] = []
    communication: list[Interval] = []
    for event in events:
        kind, name = event.get("cat"), event.get("name", "")
        if event.get("ph") != "X" or kind not in ("kernel", "gpu_memcpy"):
            continue
        span = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        if _COMMUNICATION.search(name):
            communication.append(span)
        elif kind == "kernel":
            compute.append(span)
    both = _union([*compute, *communication])
    whole = both[-1][1] - both[0][0] if both else 0.0
    if whole == 0.0:
        return None
    busy, computing, talking = (_length(part) / whole for part in (both, _union(compute), _union(communication)))
    return Overlap(whole / 1e6, computing, talking, busy - computing, 1 - busy)


def write_overlap(trace: Path, path: Path) -> Overlap | None:
    """Write the result of :func:`overlap_of` as JSON to ``path``, and return it."""
    overlap = overlap_of(trace)
    if overlap is not None:
        write_json(path, {name: round(value, 6) for name, value in asdict(overlap).items()})
    return overlap


def _union(spans: Iterable[Interval]) -> list[Interval]:
    """Merge overlapping intervals; sorted."""
    merged: list[Interval] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _length(spans: list[Interval]) -> float:
    return sum(end - start for start, end in spans)
