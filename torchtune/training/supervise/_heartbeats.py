"""What the processes of a run know of each other's progress, and what can be read from it."""

import json
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from torchtune.utils import get_logger, place, run_log_path

if TYPE_CHECKING:
    from torch.distributed import Store

FINISHED = "finished"


@dataclass(frozen=True)
class Beat:
    """A process's last sign of life.

    Attributes:
        number: grows with every beat.
        moves: see ``Activity``, as are ``step`` and ``phase``.
        moved: when it last moved, seconds of the wall clock.
        stirs: grows with other signs of life.
        waits: whether it waits for other processes.
        where: source line that it stands at, if it stands.
        left: the error that it left the loop with, or ``"finished"``.
    """

    number: int = 0
    step: int | None = None
    phase: str = "start"
    moves: int = 0
    moved: float = 0.0
    stirs: int = 0
    waits: bool = False
    where: str = ""
    left: str = ""


@dataclass
class Seen:
    """The last beat of another process, and when this process saw what of it change (``time.monotonic``)."""

    beat: Beat
    beaten: float
    moved: float


class Heartbeats:
    """Shows this process's beat to the others, and theirs to this process, through the store that they met at.

    The store's calls can block for good when the process that serves it is stopped: they are made in a thread of
    their own, over a connection of their own, and :attr:`answered` says when they last came back.

    Args:
        rank: of this process.
        world_size: of the run.
        interval: seconds between beats.
        life: the same on all ranks, and another one whenever torchrun starts them again.
        first: the first beat.

    Attributes:
        mine: the beat to show.
        looking: whether to look at the others; nobody needs to while all goes well.
        seen: what was seen of them.
        over: whether one of them has found that the run stands still.
        answered: when the store last answered.
    """

    def __init__(self, rank: int, world_size: int, interval: float, life: str, first: Beat) -> None:
        self._rank = rank
        self._ranks = range(world_size)
        self._interval = interval
        self._prefix = f"torchtune/heartbeats/{life}"
        self._stopped = threading.Event()
        self._first_to_tell: bool | None = None
        self._telling = False
        self.address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        self._none = Beat(moved=first.moved)  # of those that have not begun
        self.mine = first
        self.looking = False
        self.seen: dict[int, Seen] = {}
        self.over = False
        self.answered = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)
        self._thread.start()

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"

    def _run(self) -> None:
        from torch.distributed import DistError, TCPStore

        host, _, port = self.address.rpartition(":")
        wait = timedelta(seconds=60)
        try:
            store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=wait)
            self._exchange(store)
            last = False
            while not last:
                last = self._stopped.wait(self._interval)
                self._exchange(store)
        except DistError as error:
            get_logger().debug(f"The heartbeats end: {error}")

    def _exchange(self, store: "Store") -> None:
        store.set(self._key(self._rank), json.dumps(asdict(self.mine)))
        if self._telling and self._first_to_tell is None:
            self._first_to_tell = store.add(f"{self._prefix}/over", 1) == 1
        if self.looking:
            others = [rank for rank in self._ranks if rank != self._rank]
            # A process that has not begun has no beat yet, and the store would wait for it.
            all_there = store.check([self._key(rank) for rank in others])
            there = [rank for rank in others if all_there or store.check([self._key(rank)])]
            values = store.multi_get([self._key(rank) for rank in there]) if there else []
            beats = dict.fromkeys(others, self._none)
            beats.update({rank: Beat(**json.loads(value)) for rank, value in zip(there, values, strict=True)})
            for rank, beat in beats.items():
                self._see(rank, beat)
            self.over = self.over or store.check([f"{self._prefix}/over"])
            self.answered = time.monotonic()

    def _see(self, rank: int, beat: Beat) -> None:
        now = time.monotonic()
        known = self.seen.get(rank)
        if known is None:
            # How long it has stood before is known by the clocks on the walls alone, which may differ.
            self.seen[rank] = Seen(beat, now, now)
            return
        self.seen[rank] = Seen(
            beat,
            now if beat.number != known.beat.number else known.beaten,
            now if (beat.moves, beat.stirs) != (known.beat.moves, known.beat.stirs) else known.moved,
        )

    def tell(self, seconds: float) -> bool:
        """Let the others know that the run stands still; whether this process was the first.

        Args:
            seconds: to wait for an answer; without one, every process is the first.
        """
        self._telling = True
        deadline = time.monotonic() + seconds
        while self._first_to_tell is None and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(self._interval / 10)
        return self._first_to_tell is not False

    def leave(self, seconds: float) -> None:
        """Show the last beat and end; do not wait longer than ``seconds`` for that."""
        self._stopped.set()
        self._thread.join(seconds)


def list_ranks(ranks: Iterable[int]) -> str:
    """Ranks in words: "rank 1", "ranks 0, 2 and 3", "ranks 0-6 and 8"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(rank) for rank in run]
    if len(runs) == 1 and len(runs[0]) == 1:
        return f"rank {parts[0]}"
    return "ranks " + (f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0])


def explain(beats: dict[int, Beat], silent: set[int], now: float) -> str:
    """One sentence that says which ranks keep the others waiting, and where.

    Those that gave no sign of life do; else those that got less far in the loop; else, where all got equally far,
    those that do not wait for others.

    Args:
        beats: of all ranks that had one.
        silent: ranks that show no new ones.
        now: seconds of the wall clock.
    """
    missing = silent or {rank for rank, beat in beats.items() if beat.left not in ("", FINISHED)}
    if not missing:
        least = min(beat.moves for beat in beats.values())
        missing = {rank for rank, beat in beats.items() if beat.moves == least}
        if len(missing) > 1:
            missing = {rank for rank in missing if not beats[rank].waits} or missing
    others, first = sorted(beats.keys() - missing), min(missing)
    beat, log = beats[first], run_log_path(first)
    spot = place(beat.step, beat.phase) + (f", at {beat.where}" if beat.where else "")
    seconds = round(max(0.0, now - beat.moved))
    text = f"{list_ranks(missing)} {'has' if len(missing) == 1 else 'have'} "
    if silent:
        text += f"given no sign of life for {seconds} s, last seen {spot}"
        advice = "the process is stopped or its machine is gone" + (f"; see {log} for its last words" if log else "")
    elif beat.left:
        text += f"ended with {beat.left} {seconds} s ago, {spot}"
        advice = f"see {log or 'its output'}"
    else:
        text += f"not moved for {seconds} s, {spot}"
        advice = f"its stack is in {log or 'its output'}"
    if others and all(beats[rank].left == FINISHED for rank in others):
        text += f", while {list_ranks(others)} {'has' if len(others) == 1 else 'have'} finished"
    elif others:
        waiting = beats[others[-1]]
        verb = "waits" if len(others) == 1 else "wait"
        text += f", while {list_ranks(others)} {verb} {place(waiting.step, waiting.phase)}"
    return f"{text[0].upper()}{text[1:]}: {advice}."
