"""Record of all memory blocks of a run: allocation, release, size and purpose."""

import dataclasses
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

PHASES = ("set-up", "forward", "backward", "optimizer")
COMPONENTS = ("parameters", "gradients", "optimizer", "activations", "other")
# CUDA's caching allocator rounds sizes up to a multiple of this.
_BLOCK = 512
# (phase, layer).
Moment = tuple[str, str]
Key = TypeVar("Key")


def weighted_sum(counters: Iterable[tuple[float, "Counter[Key]"]]) -> "Counter[Key]":
    """Return the sum of factor times counter; factors may be negative."""
    total: Counter[Key] = Counter()
    for factor, counter in counters:
        for key, count in counter.items():
            total[key] += factor * count
    return total


@dataclass(eq=False, slots=True)
class Block:
    """One allocation.

    Attributes:
        size: size in bytes.
        born: time of the allocation, in events.
        component: one of ``COMPONENTS``.
        operator: operator, shape and dtype.
        where: module and line of code.
        died: time of the release; None while allocated.
        on_host: whether it is in host memory instead of the device's.
        marked: time when its component was last set.
    """

    size: int
    born: int
    component: str
    operator: str
    where: str
    died: int | None = None
    on_host: bool = False
    marked: int = 0


@dataclass(frozen=True)
class Peak:
    """Peak memory of a phase or moment.

    Attributes:
        held: bytes by (component, operator, place).
        counts: number of blocks by the same keys.
        reached_by: the allocation at the peak, as "operator in place".
    """

    held: Counter[tuple[str, str, str]]
    counts: Counter[tuple[str, str, str]]
    reached_by: str

    @property
    def total(self) -> float:
        """Total bytes."""
        return sum(self.held.values())

    @property
    def components(self) -> Counter[str]:
        """Bytes by component."""
        return weighted_sum((1, Counter({component: size})) for (component, *_), size in self.held.items())

    @classmethod
    def combine(cls, peaks: Iterable[tuple[float, "Peak"]]) -> "Peak":
        """Return the weighted sum of peaks, with the ``reached_by`` of the first peak."""
        peaks = list(peaks)
        held, counts = (
            weighted_sum((factor, getattr(peak, name)) for factor, peak in peaks) for name in ("held", "counts")
        )
        return cls(held, counts, peaks[0][1].reached_by)


def highest_by_phase(moments: dict[Moment, Peak]) -> dict[str, Peak]:
    """Return the highest peak of each phase."""
    found: dict[str, Peak] = {}
    for (phase, _), peak in moments.items():
        if phase not in found or peak.total > found[phase].total:
            found[phase] = peak
    return {phase: found[phase] for phase in PHASES if phase in found}


@dataclass
class Ledger:
    """All memory blocks of a run.

    Attributes:
        blocks: blocks in order of allocation.
        moments: (start time, moment), in order.
        time: number of events so far.
    """

    blocks: list[Block] = field(default_factory=list)
    moments: list[tuple[int, Moment]] = field(default_factory=lambda: [(0, (PHASES[0], ""))])
    time: int = 0
    _live: dict[int, Block] = field(default_factory=dict)
    _set_up: int | None = None
    _step_end: int = 0

    @property
    def phase(self) -> str:
        """Current phase of the run."""
        return self.moments[-1][1][0]

    def enter(self, phase: str, place: str = "") -> None:
        """Begin a phase, or a moment of it."""
        if self._set_up is None and phase != PHASES[0]:
            self._set_up = self.time
        self.moments.append((self.time, (phase, place)))

    def add(
        self, storage: torch.UntypedStorage, component: str, operator: str, where: str, *, on_host: bool = False
    ) -> None:
        """Record a storage, once."""
        key = storage._cdata
        if key in self._live:
            return
        self._allocate(key, _rounded(storage.size()), component, operator, where, on_host)
        weakref.finalize(storage, self._free, key)

    def _allocate(self, key: int, size: int, component: str, operator: str, where: str, on_host: bool = False) -> None:
        self.time += 1
        block = self._live[key] = Block(size, self.time, component, operator, where, on_host=on_host)
        self.blocks.append(block)

    def _free(self, key: int) -> None:
        block = self._live.pop(key, None)
        if block is not None:
            self.time += 1
            block.died = self.time

    def resized(self, storage: torch.UntypedStorage, component: str) -> None:
        """Record the new size of a known storage."""
        block = self._live.get(storage._cdata)
        size = _rounded(storage.size())
        if block is not None and block.size != size:
            self._free(storage._cdata)
            self._allocate(storage._cdata, size, component, block.operator, block.where, block.on_host)

    def mark(self, tensor: Any, component: str, *, on_host: bool = False) -> None:
        """Set the component of a tensor's memory."""
        for storage in storages(tensor):
            block = self._live.get(storage._cdata)
            if block is not None:
                if block.component != component:
                    block.component, block.marked = component, self.time
                block.on_host |= on_host

    def end_step(self) -> None:
        """Count existing blocks, except gradients, from the set-up on, because later steps start with them.

        Only the last call has an effect.
        """
        self._step_end = self.time

    def accumulate(self) -> None:
        """Count existing gradients from the set-up on, because later micro-batches of a step start with them.

        A new gradient is freed as soon as it is complete and added to the existing one.
        """
        for block in list(self._live.values()):
            if block.component == "gradients" and self._set_up is not None:
                self.blocks.append(
                    dataclasses.replace(block, born=self._set_up + 1, died=min(block.marked + 1, self.time))
                )

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in host memory."""
        blocks = (self._live.get(storage._cdata) for storage in storages(tensor))
        return any(block is not None and block.on_host for block in blocks)

    def peaks(self) -> dict[Moment, Peak]:
        """Return the peak of each moment on the device, in order of first occurrence."""
        for block in self.blocks:
            lasts = block.born <= self._step_end and (block.died is None or block.died > self._step_end)
            if lasts and block.component != "gradients" and self._set_up is not None:
                block.born = min(block.born, self._set_up + 1)
        highest: dict[Moment, tuple[int, int]] = {}  # bytes, time
        for time, moment, total in self._timeline():
            if total > highest.get(moment, (-1, 0))[0]:
                highest[moment] = (total, time)
        return {moment: self._peak(time) for moment, (_, time) in highest.items()}

    def held(self, component: str, *, on_host: bool) -> int:
        """Return the peak bytes of a component on the device, or in host memory."""
        events: Counter[int] = Counter()
        for block in self.blocks:
            if block.component == component and block.on_host is on_host:
                events[block.born] += block.size
                if block.died is not None:
                    events[block.died] -= block.size
        total = most = 0
        for time in sorted(events):
            total += events[time]
            most = max(most, total)
        return most

    def _timeline(self) -> Iterator[tuple[int, Moment, int]]:
        """Yield (time, moment, bytes on the device) after every event, and at the start of every moment."""
        changes = [0] * (self.time + 1)
        for block in self.blocks:
            if not block.on_host:
                changes[block.born] += block.size
                if block.died is not None:
                    changes[block.died] -= block.size
        starts = [*self.moments[1:], (self.time + 1, ("", ""))]
        moment, following, total = self.moments[0][1], 0, 0
        for time in range(1, self.time + 1):
            while starts[following][0] < time:
                moment, following = starts[following][1], following + 1
                yield time - 1, moment, total
            total += changes[time]
            yield time, moment, total

    def _peak(self, time: int) -> Peak:
        held: Counter[tuple[str, str, str]] = Counter()
        counts: Counter[tuple[str, str, str]] = Counter()
        last = self.blocks[0]
        for block in self.blocks:
            if block.born <= time and (block.died is None or block.died > time) and not block.on_host:
                key = (block.component, block.operator, block.where)
                held[key] += block.size
                counts[key] += 1
                last = max(last, block, key=lambda one: one.born)
        return Peak(held, counts, f"{last.operator} in {last.where}")


def storages(tensor: Any) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of a tensor; for a wrapper tensor, of its inner tensors."""
    if not isinstance(tensor, torch.Tensor):
        return
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from storages(getattr(tensor, name))
    elif tensor.device.type != "meta":
        yield tensor.untyped_storage()


def _rounded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK
