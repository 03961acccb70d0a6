"""Record of all memory blocks of a run: allocation, release, size and purpose."""

import dataclasses
import math
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
        sizes: Counter[str] = Counter()
        for (component, _, _), size in self.held.items():
            sizes[component] += size
        return sizes

    @classmethod
    def combine(cls, peaks: Iterable[tuple[float, "Peak"]]) -> "Peak":
        """Return the weighted sum of peaks, with the ``reached_by`` of the first peak."""
        peaks = list(peaks)
        held = weighted_sum((factor, peak.held) for factor, peak in peaks)
        counts = weighted_sum((factor, peak.counts) for factor, peak in peaks)
        first = peaks[0][1]
        return cls(held, counts, first.reached_by)


def highest_by_phase(moments: dict[Moment, Peak]) -> dict[str, Peak]:
    """Return the highest peak of each phase, in the order of ``PHASES``."""
    highest: dict[str, Peak] = {}
    for (phase, _), peak in moments.items():
        if phase not in highest or peak.total > highest[phase].total:
            highest[phase] = peak
    return {phase: highest[phase] for phase in PHASES if phase in highest}


@dataclass
class Ledger:
    """All memory blocks of a run.

    Attributes:
        blocks: blocks in order of allocation.
        moments: (start time, moment), in order.
        time: number of events so far; an event is an allocation or a release.
        _live: allocated blocks by the address of their storage.
        _set_up: time of the end of the set-up; None before.
        _step_end: time of the end of the last step.
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

    def enter(self, phase: str, layer: str = "") -> None:
        """Begin a phase, or with a layer a moment of the phase."""
        if self._set_up is None and phase != PHASES[0]:
            self._set_up = self.time
        self.moments.append((self.time, (phase, layer)))

    def add(
        self, storage: torch.UntypedStorage, component: str, operator: str, where: str, *, on_host: bool = False
    ) -> None:
        """Record a storage, once."""
        key = storage._cdata
        if key in self._live:
            return
        self._allocate(key, _rounded(storage.size()), component, operator, where, on_host)
        weakref.finalize(storage, self._free, key)  # called when torch releases the memory

    def _allocate(self, key: int, size: int, component: str, operator: str, where: str, on_host: bool = False) -> None:
        """Record an allocation; the key is that of its storage."""
        self.time += 1
        block = Block(size, self.time, component, operator, where, on_host=on_host)
        self._live[key] = block
        self.blocks.append(block)

    def _free(self, key: int) -> None:
        """Record the release of a storage's memory."""
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
            if block is None:
                continue
            if block.component != component:
                block.component = component
                block.marked = self.time
            block.on_host = block.on_host or on_host

    def end_step(self) -> None:
        """Count existing blocks, except gradients, from the set-up on, because later steps start with them.

        Only the last call has an effect.
        """
        self._step_end = self.time

    def accumulate(self) -> None:
        """Count existing gradients from the set-up on, because later micro-batches of a step start with them.

        A new gradient is freed as soon as it is complete and added to the existing one.
        """
        if self._set_up is None:
            return
        for block in list(self._live.values()):
            if block.component == "gradients":
                released = min(block.marked + 1, self.time)
                self.blocks.append(dataclasses.replace(block, born=self._set_up + 1, died=released))

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in host memory."""
        for storage in storages(tensor):
            block = self._live.get(storage._cdata)
            if block is not None and block.on_host:
                return True
        return False

    def peaks(self) -> dict[Moment, Peak]:
        """Return the peak of each moment on the device, in order of first occurrence."""
        if self._set_up is not None:
            # Blocks that outlast a step count from the set-up on; see :meth:`end_step`.
            for block in self.blocks:
                outlasts_step = block.born <= self._step_end and (block.died is None or block.died > self._step_end)
                if outlasts_step and block.component != "gradients":
                    block.born = min(block.born, self._set_up + 1)
        highest: dict[Moment, int] = {}
        time_of_highest: dict[Moment, int] = {}
        for time, moment, size in self._timeline():
            if size > highest.get(moment, -1):
                highest[moment] = size
                time_of_highest[moment] = time
        return {moment: self._peak(time) for moment, time in time_of_highest.items()}

    def held(self, component: str, *, on_host: bool) -> int:
        """Return the peak bytes of a component on the device, or in host memory."""
        # Blocks may be marked long after their allocation, so that the peak is known at the end alone.
        changes: Counter[int] = Counter()  # bytes allocated minus bytes released, by time
        for block in self.blocks:
            if block.component == component and block.on_host is on_host:
                changes[block.born] += block.size
                if block.died is not None:
                    changes[block.died] -= block.size
        size = 0
        highest = 0
        for time in sorted(changes):
            size += changes[time]
            highest = max(highest, size)
        return highest

    def _timeline(self) -> Iterator[tuple[int, Moment, int]]:
        """Yield (time, moment, bytes on the device) after every event, and at the start of every moment.

        A moment without an event has the memory with which it starts.
        """
        changes = [0] * (self.time + 1)
        for block in self.blocks:
            if not block.on_host:
                changes[block.born] += block.size
                if block.died is not None:
                    changes[block.died] -= block.size
        moment = self.moments[0][1]
        # The last start is after all events, so that there is always a next one.
        later_starts = [*self.moments[1:], (self.time + 1, ("", ""))]
        index = 0
        size = 0
        for time in range(1, self.time + 1):
            # Several moments may start between two events; each starts with the bytes after the previous event.
            while later_starts[index][0] < time:
                moment = later_starts[index][1]
                index += 1
                yield time - 1, moment, size
            size += changes[time]
            yield time, moment, size

    def _peak(self, time: int) -> Peak:
        """Return the blocks on the device at a time."""
        held: Counter[tuple[str, str, str]] = Counter()
        counts: Counter[tuple[str, str, str]] = Counter()
        newest = self.blocks[0]
        for block in self.blocks:
            is_allocated = block.born <= time and (block.died is None or block.died > time)
            if is_allocated and not block.on_host:
                key = (block.component, block.operator, block.where)
                held[key] += block.size
                counts[key] += 1
                if block.born > newest.born:
                    newest = block
        return Peak(held, counts, f"{newest.operator} in {newest.where}")


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
    """Return a size as the allocator rounds it up."""
    return math.ceil(size / _BLOCK) * _BLOCK
