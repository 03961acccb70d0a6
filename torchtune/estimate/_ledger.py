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
# A phase, and a place in it: the layer that is computed.
Moment = tuple[str, str]
Key = TypeVar("Key")


def weighted_sum(counters: Iterable[tuple[float, "Counter[Key]"]]) -> "Counter[Key]":
    """Sum of counters, each times a factor, which may be negative."""
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
        what: operator, shape and dtype.
        where: module, and line of code.
        died: time when it was freed; None while it lives.
        on_host: whether it lies in host memory, so that the device does not hold it.
        marked: time when its component was last said.
    """

    size: int
    born: int
    component: str
    what: str
    where: str
    died: int | None = None
    on_host: bool = False
    marked: int = 0


@dataclass(frozen=True)
class Peak:
    """The most memory of a phase, or of a moment of it.

    Attributes:
        held: bytes by (component, what, where).
        counts: blocks, by the same.
        reached_by: the block whose allocation reached it.
    """

    held: Counter[tuple[str, str, str]]
    counts: Counter[tuple[str, str, str]]
    reached_by: str

    @property
    def total(self) -> float:
        """Bytes."""
        return sum(self.held.values())

    @property
    def components(self) -> Counter[str]:
        """Bytes by component."""
        return weighted_sum((1, Counter({component: size})) for (component, *_), size in self.held.items())

    @classmethod
    def combine(cls, peaks: Iterable[tuple[float, "Peak"]]) -> "Peak":
        """Weighted sum of peaks; the first one says what reached it."""
        peaks = list(peaks)
        held, counts = (
            weighted_sum((factor, getattr(peak, name)) for factor, peak in peaks) for name in ("held", "counts")
        )
        return cls(held, counts, peaks[0][1].reached_by)


def highest_by_phase(moments: dict[Moment, Peak]) -> dict[str, Peak]:
    """The peak of every phase that there was, out of those of its moments."""
    found: dict[str, Peak] = {}
    for (phase, _), peak in moments.items():
        if phase not in found or peak.total > found[phase].total:
            found[phase] = peak
    return {phase: found[phase] for phase in PHASES if phase in found}


@dataclass
class Ledger:
    """Blocks in order of allocation.

    Attributes:
        blocks: all of them.
        moments: (time, moment) of the beginning of each, in order.
        time: events so far.
    """

    blocks: list[Block] = field(default_factory=list)
    moments: list[tuple[int, Moment]] = field(default_factory=lambda: [(0, (PHASES[0], ""))])
    time: int = 0
    _live: dict[int, Block] = field(default_factory=dict)
    _set_up: int | None = None
    _step_end: int = 0

    @property
    def phase(self) -> str:
        """The phase that the run is in."""
        return self.moments[-1][1][0]

    def enter(self, phase: str, place: str = "") -> None:
        """Let a phase, or a moment of it, begin."""
        if self._set_up is None and phase != PHASES[0]:
            self._set_up = self.time
        self.moments.append((self.time, (phase, place)))

    def add(
        self, storage: torch.UntypedStorage, component: str, what: str, where: str, *, on_host: bool = False
    ) -> None:
        """Record a storage, once."""
        key = storage._cdata
        if key in self._live:
            return
        self._allocate(key, _rounded(storage.size()), component, what, where, on_host)
        weakref.finalize(storage, self._free, key)

    def _allocate(self, key: int, size: int, component: str, what: str, where: str, on_host: bool = False) -> None:
        self.time += 1
        block = self._live[key] = Block(size, self.time, component, what, where, on_host=on_host)
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
            self._allocate(storage._cdata, size, component, block.what, block.where, block.on_host)

    def mark(self, tensor: Any, component: str, *, on_host: bool = False) -> None:
        """Set the component of a tensor's memory."""
        for storage in storages(tensor):
            block = self._live.get(storage._cdata)
            if block is not None:
                if block.component != component:
                    block.component, block.marked = component, self.time
                block.on_host |= on_host

    def end_step(self) -> None:
        """Let what there is now, but for gradients, count from the set-up on, as it does in every step but the first.

        The last call counts.
        """
        self._step_end = self.time

    def accumulate(self) -> None:
        """Count the gradients that there are from the set-up on, as in every micro-batch but the first of a step.

        Where such a gradient exists, a new one is added to it as soon as it is complete, and freed.
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
        """The peak of every moment on the device, in the order in which they come first."""
        for block in self.blocks:
            lasts = block.born <= self._step_end and (block.died is None or block.died > self._step_end)
            if lasts and block.component != "gradients" and self._set_up is not None:
                block.born = min(block.born, self._set_up + 1)
        highest: dict[Moment, tuple[int, int]] = {}  # bytes, time
        for time, moment, total in self._course():
            if total > highest.get(moment, (-1, 0))[0]:
                highest[moment] = (total, time)
        return {moment: self._peak(time) for moment, (_, time) in highest.items()}

    def held(self, component: str, *, on_host: bool) -> int:
        """Most bytes of a component that live at a time on the device, or in host memory."""
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

    def _course(self) -> Iterator[tuple[int, Moment, int]]:
        """(time, moment, bytes on the device) after every event, and when a moment begins."""
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
                key = (block.component, block.what, block.where)
                held[key] += block.size
                counts[key] += 1
                last = max(last, block, key=lambda one: one.born)
        return Peak(held, counts, f"{last.what} in {last.where}")


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
