"""Heartbeats: every rank publishes its progress, so that stalled ranks can be found."""

import json
import os
import socket
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
# Published by a rank that ends because its agent died, or because another rank is gone.
ORPHANED, PEER_LOST = "orphaned", "bereft"


@dataclass(frozen=True)
class Beat:
    """The heartbeat of one rank.

    Attributes:
        number: increases with every beat.
        step, phase, moves, signs: fields of the rank's ``Activity``.
        moved: time of its last sign of life, seconds since the epoch.
        waits: whether it waits in a collective.
        where: source line, if it stalls.
        left: name of the error that ended its loop, or ``FINISHED``, ``ORPHANED``, ``PEER_LOST``.
        machine: node rank and host name.
        words: message of the error, if it is a user error.
    """

    number: int = 0
    step: int | None = None
    phase: str = "start"
    moves: int = 0
    moved: float = 0.0
    signs: int = 0
    waits: bool = False
    where: str = ""
    left: str = ""
    machine: str = ""
    words: str = ""

    @property
    def failed(self) -> bool:
        """Whether the rank ended with an error that is not caused by another rank's end."""
        return self.left not in ("", FINISHED, ORPHANED, PEER_LOST)


@dataclass
class PeerBeat:
    """The last beat of another rank, and when this rank saw it change (``time.monotonic``)."""

    beat: Beat
    beat_at: float
    moved: float


class Heartbeats:
    """Publishes this rank's beat in the store of the process group, and reads the other ranks' beats.

    Store calls block while the process that serves the store is stopped, so a separate thread with its own connection
    makes them. The thread first waits for the store, which rank 0 may open only when it joins the process group.

    Args:
        rank: rank of this process.
        world_size: number of ranks.
        interval: seconds between beats.
        run_id: equal on all ranks, different after every restart by torchrun.
        first: the first beat.

    Attributes:
        mine: the beat to publish.
        reads_peers: whether to read the beats of other ranks; only needed when this rank stalls.
        seen: the beats that were read.
        is_stalled: whether a rank has found that the run stalls.
        has_failed_rank: whether a rank has ended early; the beats are then read.
        last_reply: when the store last answered.
    """

    def __init__(self, rank: int, world_size: int, interval: float, run_id: str, first: Beat) -> None:
        self._rank, self._interval = rank, interval
        self._others = [other for other in range(world_size) if other != rank]
        self._prefix = f"torchtune/heartbeats/{run_id}"
        self._stop_event, self._wake_event = threading.Event(), threading.Event()
        self._announces_stall = self.reads_peers = self.is_stalled = self.has_failed_rank = False
        self.address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        self._initial_beat = Beat(moved=first.moved)  # of ranks without a beat so far
        self.mine = first
        self.seen: dict[int, PeerBeat] = {}
        self.last_reply = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)
        self._thread.start()

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"

    def _run(self) -> None:
        from torch.distributed import DistError, TCPStore

        host, _, port = self.address.rpartition(":")
        wait = timedelta(seconds=60)
        try:
            while not _is_port_open(host, int(port)):
                if self._stop_event.wait(self._interval):
                    return
            store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=wait)
            self._sync_with_store(store)
            last = False
            while not last:
                self._wake_event.wait(self._interval)
                self._wake_event.clear()
                last = self._stop_event.is_set()
                self._sync_with_store(store)
        except DistError as error:
            get_logger().debug(f"The heartbeats end: {error}")

    def _sync_with_store(self, store: "Store") -> None:
        store.set(self._key(self._rank), json.dumps(asdict(self.mine)))
        if self._announces_stall:
            store.set(f"{self._prefix}/over", "")
        if self.mine.failed or self.mine.left == ORPHANED:
            store.set(f"{self._prefix}/broken", "")
        self.has_failed_rank = self.has_failed_rank or store.check([f"{self._prefix}/broken"])
        if not (self.reads_peers or self.has_failed_rank):
            return
        # The store would wait for the key of a rank without a beat.
        all_there = store.check([self._key(rank) for rank in self._others])
        there = [rank for rank in self._others if all_there or store.check([self._key(rank)])]
        values = store.multi_get([self._key(rank) for rank in there]) if there else []
        beats = dict.fromkeys(self._others, self._initial_beat)
        beats |= {rank: Beat(**json.loads(value)) for rank, value in zip(there, values, strict=True)}
        for rank, beat in beats.items():
            self._update_peer(rank, beat)
        self.is_stalled = self.is_stalled or store.check([f"{self._prefix}/over"])
        self.last_reply = time.monotonic()

    def _update_peer(self, rank: int, beat: Beat) -> None:
        now = time.monotonic()
        # Clocks of machines differ, so time before the first look does not count.
        last = self.seen.get(rank, PeerBeat(beat, now, now))
        beat_at = last.beat_at if beat.number == last.beat.number else now
        moved = last.moved if (beat.moves, beat.signs) == (last.beat.moves, last.beat.signs) else now
        self.seen[rank] = PeerBeat(beat, beat_at, moved)

    def announce_stall(self) -> None:
        """Announce to the other ranks that the run stalls."""
        self._announces_stall = True
        self._wake_event.set()

    def find_lost_ranks(self, seconds: float, patience: float) -> dict[int, Beat] | None:
        """Return the last beats of the ranks that are gone or, if there are none, of the ranks that failed.

        Returns None if the store does not answer, and returns early if a rank publishes why it ends.

        Args:
            seconds: a rank without a new beat for this time is gone.
            patience: timeout in seconds for the first answer; a slow name server may delay the connection.
        """
        start, first = time.monotonic(), {}
        deadline = start + patience
        self._interval, self.has_failed_rank = min(self._interval, 0.2), True
        self._wake_event.set()
        while self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(self._interval / 2)
            if self.last_reply < start:
                continue
            if not first:
                first, deadline = self._peer_beats(), time.monotonic() + seconds
            if ended := self.failed_ranks():
                return ended
        if not first or not self._thread.is_alive():
            return None
        beats = self._peer_beats()
        return {rank: beat for rank, beat in beats.items() if not beat.left and beat.number == first[rank].number}

    def failed_ranks(self) -> dict[int, Beat]:
        """Return the last beats read of ranks that lost their agent or, if there are none, of ranks that failed."""
        beats = self._peer_beats()
        orphaned = {rank: beat for rank, beat in beats.items() if beat.left == ORPHANED}
        return orphaned or {rank: beat for rank, beat in beats.items() if beat.failed}

    def _peer_beats(self) -> dict[int, Beat]:
        return {rank: seen.beat for rank, seen in list(self.seen.items())}

    def stop(self, seconds: float) -> None:
        """Publish the last beat and end, within ``seconds``."""
        self._stop_event.set()
        self._wake_event.set()
        self._thread.join(seconds)


def _is_port_open(host: str, port: int) -> bool:
    """Return whether the port accepts connections; torch would print a warning per failed attempt."""
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True


def list_ranks(ranks: Iterable[int]) -> str:
    """Return ranks in words: "rank 1", "ranks 0, 2 and 3", "ranks 0-6 and 8"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    *parts, last = [
        part for run in runs for part in ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(rank) for rank in run])
    ]
    if not parts:
        return f"rank {last}" if len(runs[0]) == 1 else f"ranks {last}"
    return f"ranks {', '.join(parts)} and {last}"


def describe_stall(beats: dict[int, Beat], silent: set[int], now: float) -> str:
    """Return one sentence: the stalled ranks and their location.

    Ranks without a heartbeat or with an error count as stalled. If there are none, ranks that are behind in the loop
    do; if there are none either, ranks that do not wait in a collective.

    Args:
        beats: beats of all ranks that have published a beat.
        silent: ranks without a recent heartbeat.
        now: seconds since the epoch.
    """
    missing = silent or {rank for rank, beat in beats.items() if beat.failed}
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
