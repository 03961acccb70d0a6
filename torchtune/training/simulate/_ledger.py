"""Every block of memory of a run: when it was allocated and freed, how large it is, and what it is for."""

import weakref
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

PHASES = ("set-up", "forward", "backward", "optimizer")
COMPONENTS = ("parameters", "gradients", "optimizer", "activations", "other")
# CUDA's caching allocator rounds sizes up to it.
_BLOCK = 512


@dataclass(eq=False, slots=True)
class Block:
    """One allocation.

    Attributes:
        size: bytes.
        born: time of the allocation, in events.
        component: one of ``COMPONENTS``.
        what: operator, shape and dtype.
        where: module, and line of code.
        died: time when it was freed; None while it lives.
        on_host: whether it lies in host memory, so that the device does not hold it.
    """

    size: int
    born: int
    component: str
    what: str
    where: str
    died: int | None = None
    on_host: bool = False


@dataclass(frozen=True)
class Peak:
    """The most memory of a phase.

    Attributes:
        total: bytes.
        components: bytes by component, at that moment.
        block: whose allocation reached it.
        largest: (bytes, count, what, where) of what was held then, the largest groups first.
    """

    total: int
    components: dict[str, int]
    block: Block
    largest: list[tuple[int, int, str, str]]


@dataclass
class Ledger:
    """Blocks in the order of their allocation.

    Attributes:
        blocks: all of them.
        phases: (time, name) of the phases, in order.
        time: events so far.
    """

    blocks: list[Block] = field(default_factory=list)
    phases: list[tuple[int, str]] = field(default_factory=lambda: [(0, PHASES[0])])
    time: int = 0
    _live: dict[int, Block] = field(default_factory=dict)

    @property
    def phase(self) -> str:
        """The phase that the run is in."""
        return self.phases[-1][1]

    def enter(self, phase: str) -> None:
        """Let a phase begin."""
        if phase != self.phase:
            self.phases.append((self.time, phase))

    def add(
        self, storage: torch.UntypedStorage, component: str, what: str, where: str, *, on_host: bool = False
    ) -> None:
        """Note a storage, once."""
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
        """Note that a known storage has another size now."""
        block = self._live.get(storage._cdata)
        size = _rounded(storage.size())
        if block is not None and block.size != size:
            self._free(storage._cdata)
            self._allocate(storage._cdata, size, component, block.what, block.where, block.on_host)

    def mark(self, tensor: Any, component: str, *, on_host: bool = False) -> None:
        """Say what the memory of a tensor is for."""
        for storage in storages(tensor):
            block = self._live.get(storage._cdata)
            if block is not None:
                block.component, block.on_host = component, block.on_host or on_host

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in host memory."""
        blocks = (self._live.get(storage._cdata) for storage in storages(tensor))
        return any(block is not None and block.on_host for block in blocks)

    def peaks(self) -> dict[str, Peak]:
        """The peak of every phase that there was, on the device."""
        highest: dict[str, tuple[int, int]] = {}  # phase -> (bytes, time)
        for time, phase, total in self._course():
            if total > highest.get(phase, (-1, 0))[0]:
                highest[phase] = (total, time)
        return {phase: self._peak(*highest[phase]) for phase in PHASES if phase in highest}

    def first_over(self, limit: int) -> tuple[str, Peak] | None:
        """(phase, state) of the first allocation with which the device holds more than ``limit`` bytes."""
        for time, phase, total in self._course():
            if total > limit:
                return phase, self._peak(total, time)
        return None

    def held(self, component: str, *, on_host: bool) -> int:
        """Most bytes of a component that live at a time on the device, or in host memory."""
        events: dict[int, int] = defaultdict(int)
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

    def _course(self) -> Iterator[tuple[int, str, int]]:
        """(time, phase, bytes on the device) after every event, and when a phase begins."""
        changes = [0] * (self.time + 1)
        for block in self.blocks:
            if not block.on_host:
                changes[block.born] += block.size
                if block.died is not None:
                    changes[block.died] -= block.size
        starts = [*self.phases[1:], (self.time + 1, "")]
        phase, following, total = self.phases[0][1], 0, 0
        for time in range(1, self.time + 1):
            while starts[following][0] < time:
                phase, following = starts[following][1], following + 1
                yield time - 1, phase, total
            total += changes[time]
            yield time, phase, total

    def _peak(self, total: int, time: int) -> Peak:
        components = dict.fromkeys(COMPONENTS, 0)
        groups: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
        last = self.blocks[0]
        for block in self.blocks:
            if block.born <= time and (block.died is None or block.died > time) and not block.on_host:
                components[block.component] += block.size
                group = groups[(block.what, f"{block.where} ({block.component})")]
                group[0], group[1], last = group[0] + block.size, group[1] + 1, block
        largest = sorted(((*sizes, *names) for names, sizes in groups.items()), reverse=True)
        return Peak(total, components, last, largest[:5])


def storages(tensor: Any) -> Iterator[torch.UntypedStorage]:
    """The storages of a tensor; of one that wraps others, theirs."""
    if not isinstance(tensor, torch.Tensor):
        return
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from storages(getattr(tensor, name))
    elif tensor.device.type != "meta":
        yield tensor.untyped_storage()


def _rounded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK
