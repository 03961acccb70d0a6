"""Heartbeats and lifelines, by which stalled and lost ranks are found and named.

Every rank publishes its progress in a store. A connection between two ranks, a lifeline, ends with either process.
"""

import ipaddress
import json
import os
import platform
import secrets
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

from torchtune.utils import EXIT_REQUEUE, LostRankError, UserError, get_logger, place, run_log_path

if TYPE_CHECKING:
    from torch.distributed import Store

# A rank without a new beat for so many intervals is silent.
_SILENT_INTERVALS = 5
FINISHED = "finished"
# Published by a rank that ends because its agent died, or because another rank is gone.
ORPHANED = "orphaned"
PEER_LOST = "lost a peer"
_FAREWELL = b"."  # sent by a rank that has finished
_CONNECT_SECONDS = 5.0
# A machine that vanishes closes nothing. Its neighbors probe it after a minute without traffic, and then every 20
# seconds; it is gone after six probes without a reply.
_PROBES = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 20, "TCP_KEEPCNT": 6}


@dataclass(frozen=True)
class Beat:
    """The heartbeat of one rank.

    Attributes:
        number: increases with every beat.
        step, phase, moves, signs: fields of the rank's ``Activity``.
        moved_at: time of its last sign of life, seconds since the epoch.
        waits: whether it waits in a collective.
        source_line: row of data and source line at which it is, if it stalls.
        end: name of the error that ended its loop, or ``FINISHED``, ``ORPHANED``, ``PEER_LOST``.
        machine: node rank and host name.
        error: message of the error, if it is a user error.
        lost_neighbors: neighbors whose lifeline has ended.
    """

    number: int = 0
    step: int | None = None
    phase: str = "start"
    moves: int = 0
    moved_at: float = 0.0
    signs: int = 0
    waits: bool = False
    source_line: str = ""
    end: str = ""
    machine: str = ""
    error: str = ""
    lost_neighbors: tuple[int, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether the rank ended with an error that is not caused by another rank's end."""
        return self.end not in ("", FINISHED, ORPHANED, PEER_LOST)


@dataclass
class PeerBeat:
    """The last beat of another rank, and when this rank saw it change (``time.monotonic``).

    Attributes:
        beat: the beat.
        beat_at: when its number changed.
        moved_at: when its moves or signs of life changed.
    """

    beat: Beat
    beat_at: float
    moved_at: float


class Heartbeats:
    """Publishes this rank's beat in the store of the process group, and reads the other ranks' beats.

    Store calls block while the process that serves the store is stopped, so a separate thread with its own connection
    makes them. The thread first waits for the store, which rank 0 may open only when it joins the process group.

    Args:
        rank: rank of this process.
        world_size: number of ranks.
        interval: seconds between beats.
        run_id: equal on all ranks, different after every restart by torchrun.
        first_beat: the first beat.

    Attributes:
        own_beat: the beat to publish.
        needs_peer_beats: whether to read the beats of other ranks; the watchdog sets it when this rank stalls.
        peer_beats: the beats of other ranks that were read, by rank.
        is_stalled: whether a rank has found that the run stalls.
        has_failed_rank: whether a rank has ended early; the beats are then read.
        has_lost_store: whether the store has ended.
        last_reply: when the store last answered.
    """

    def __init__(self, rank: int, world_size: int, interval: float, run_id: str, first_beat: Beat) -> None:
        self._rank = rank
        self._interval = interval
        self._world_size = world_size
        self._peers = [peer for peer in range(world_size) if peer != rank]
        self._prefix = f"torchtune/heartbeats/{run_id}"
        self._stop_event = threading.Event()
        self._wake_event = threading.Event()
        # The thread alone calls the store: the watchdog sets what it is to publish and to read.
        self._must_announce_stall = False
        self.needs_peer_beats = False
        # Connections to the neighboring ranks, which end with a killed process; the thread makes them, because the
        # address of this machine is known only when the store accepts connections.
        self._lifelines: Lifelines | None = None
        self.is_stalled = False
        self.has_failed_rank = False
        self.has_lost_store = False
        self.address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        self._initial_beat = Beat(moved_at=first_beat.moved_at)  # of ranks without a beat so far
        self.own_beat = first_beat
        self.peer_beats: dict[int, PeerBeat] = {}
        self.last_reply = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)
        self._thread.start()

    def _key(self, rank: int) -> str:
        """Return the key of a rank's beat in the store."""
        return f"{self._prefix}/{rank}"

    def _run(self) -> None:
        """Publish and read beats until the run or its store ends; the target of the thread."""
        from torch.distributed import DistError, TCPStore

        host, _, port = self.address.rpartition(":")
        timeout = timedelta(seconds=60)  # of a call to the store
        own_host = _own_host(host, int(port))  # by a connection to the store, which rank 0 may open later
        while own_host is None:
            if self._stop_event.wait(self._interval):
                return
            own_host = _own_host(host, int(port))
        self._lifelines = Lifelines(self._rank, self._world_size, self._prefix, own_host)
        try:
            store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
            self._lifelines.open(store)
            self._sync_with_store(store)
            is_last = False
            while not is_last:
                self._wake_event.wait(self._interval)  # shorter if a stall, the search for a rank or the end is urgent
                self._wake_event.clear()
                is_last = self._stop_event.is_set()  # read before the beat, so that the last beat is published
                self._lifelines.connect(store)
                self._lifelines.poll()
                self._sync_with_store(store)
        except DistError as error:
            get_logger().debug(f"The heartbeats end: {error}")
            self.has_lost_store = True
        # Reached with `_stop_event` set, or without a store: rank 0 may have finished, and its store with it, or be
        # lost, and only the lifelines show which.
        while not self._stop_event.wait(self._interval):
            self._lifelines.poll()
        self._lifelines.close(has_finished=self.own_beat.end == FINISHED)

    def _sync_with_store(self, store: "Store") -> None:
        """Publish this rank's beat, and read the others' if they are needed."""
        own_beat = replace(self.own_beat, lost_neighbors=tuple(self._cut_ranks()))
        store.set(self._key(self._rank), json.dumps(asdict(own_beat)))
        # Two keys that every rank can check without reading all beats: the run stalls, or a rank ended early.
        if self._must_announce_stall:
            store.set(f"{self._prefix}/over", "")
        if own_beat.failed or own_beat.end == ORPHANED or own_beat.lost_neighbors:
            store.set(f"{self._prefix}/broken", "")
        self.has_failed_rank = self.has_failed_rank or store.check([f"{self._prefix}/broken"])
        # In a run that goes well, ranks only write: a thousand ranks that read all others would load the store.
        if not (self.needs_peer_beats or self.has_failed_rank):
            return
        # Times are those of this machine's clock, because clocks differ between machines.
        now = time.monotonic()
        for rank, beat in self._read_beats(store).items():
            peer = PeerBeat(beat, beat_at=now, moved_at=now)
            last = self.peer_beats.get(rank)
            # What has not changed since the last look keeps the time of the last change.
            if last is not None and beat.number == last.beat.number:
                peer.beat_at = last.beat_at
            if last is not None and (beat.moves, beat.signs) == (last.beat.moves, last.beat.signs):
                peer.moved_at = last.moved_at
            self.peer_beats[rank] = peer
        self.is_stalled = self.is_stalled or store.check([f"{self._prefix}/over"])
        self.last_reply = time.monotonic()

    def _read_beats(self, store: "Store") -> dict[int, Beat]:
        """Return the beats of all other ranks; the initial beat for ranks that have not published one."""
        # Reading the key of a rank without a beat would wait for it. One question suffices once all have beats.
        if store.check([self._key(rank) for rank in self._peers]):
            ranks = self._peers
        else:
            ranks = [rank for rank in self._peers if store.check([self._key(rank)])]
        beats = dict.fromkeys(self._peers, self._initial_beat)
        if ranks:
            values = store.multi_get([self._key(rank) for rank in ranks])
            for rank, value in zip(ranks, values, strict=True):
                beats[rank] = Beat(**json.loads(value))
        return beats

    def announce_stall(self) -> None:
        """Announce to the other ranks that the run stalls."""
        self._must_announce_stall = True
        self._wake_event.set()

    def find_lost_ranks(self, seconds: float, patience: float) -> dict[int, Beat] | None:
        """Return the last beats of the ranks that are gone or, if there are none, of the ranks that failed.

        Returns None if the store does not answer, and returns early if a rank publishes why it ends.

        Args:
            seconds: a rank without a new beat for this time is gone.
            patience: timeout in seconds for the first answer; a slow name server may delay the connection.
        """
        start = time.monotonic()
        deadline = start + patience
        first_beats: dict[int, Beat] = {}
        self._interval = min(self._interval, 0.2)  # training is over, so that frequent beats disturb nobody
        self.has_failed_rank = True  # so that the thread reads beats
        self._wake_event.set()
        while not self.has_lost_store and time.monotonic() < deadline:
            time.sleep(self._interval / 2)
            if self.last_reply < start:  # no beats have been read since the search began
                continue
            if not first_beats:  # from now on, every living rank publishes new ones
                first_beats = self._peer_beats()
                deadline = time.monotonic() + seconds
            failed = self.failed_ranks()
            if failed:
                return failed
        if not first_beats or self.has_lost_store:
            return None
        lost_beats = {}
        for rank, beat in self._peer_beats().items():
            if not beat.end and beat.number == first_beats[rank].number:
                lost_beats[rank] = beat
        return lost_beats

    def failed_ranks(self) -> dict[int, Beat]:
        """Return the last beats read of ranks that lost their agent, else of ranks that failed, else of gone ranks."""
        beats = self._peer_beats()
        orphaned = {rank: beat for rank, beat in beats.items() if beat.end == ORPHANED}
        failed = {rank: beat for rank, beat in beats.items() if beat.failed}
        return orphaned or failed or self.gone_ranks()

    def gone_ranks(self) -> dict[int, Beat]:
        """Return the last beats read of ranks that were killed: their lifeline is cut, and their beats have ended.

        Other ranks of a lost machine have no lifeline to a living rank: they are gone if their beats have ended, too.
        """
        silent = {}
        now = time.monotonic()
        for rank, peer in list(self.peer_beats.items()):
            if not peer.beat.end and now - peer.beat_at > _SILENT_INTERVALS * self._interval:
                silent[rank] = peer.beat
        cut = set(self._cut_ranks())
        for beat in self._peer_beats().values():
            cut.update(beat.lost_neighbors)
        if cut.isdisjoint(silent):
            return {}
        return silent

    @property
    def is_alone(self) -> bool:
        """Whether the store and a neighboring rank are lost."""
        return self.has_lost_store and bool(self._cut_ranks())

    def _cut_ranks(self) -> list[int]:
        """Return the neighbors whose lifeline has ended."""
        if self._lifelines is None:
            return []
        return sorted(self._lifelines.cut_ranks)

    def _peer_beats(self) -> dict[int, Beat]:
        """Return the beats that were read, which the thread may be changing."""
        return {rank: peer.beat for rank, peer in list(self.peer_beats.items())}

    def stop(self, seconds: float) -> None:
        """Publish the last beat and end, within ``seconds``."""
        self._stop_event.set()
        self._wake_event.set()
        self._thread.join(seconds)


class Lifelines:
    """Connections of this rank to the next and to the previous rank, which end with a process, even if it is killed.

    All connections form a ring.

    NCCL does not notice when a rank is killed, and a rank without a heartbeat may only be stopped. But the operating
    system closes the connections of every process that ends.

    Nothing here waits for another rank or raises an error. Without a connection, for example because of a firewall, a
    killed rank remains unnoticed until the timeout of the watchdog.

    Args:
        rank: rank of this process.
        world_size: number of ranks.
        prefix: prefix of keys in the store.
        host: address of this machine.

    Attributes:
        cut_ranks: neighbors whose connection ended without a farewell.
    """

    def __init__(self, rank: int, world_size: int, prefix: str, host: str) -> None:
        self._next_rank = (rank + 1) % world_size
        self._previous_rank = (rank - 1) % world_size
        self._host = host
        self._own_key = f"{prefix}/address/{rank}"
        self._next_key = f"{prefix}/address/{self._next_rank}"
        self._token = secrets.token_bytes(16)  # known to ranks, not to others that connect to an open port
        self._listener: socket.socket | None = None
        self._callers: list[socket.socket] = []  # have not sent the token so far
        self._is_next_called = False
        self._lines: dict[socket.socket, int] = {}
        self.cut_ranks: set[int] = set()
        _all_lifelines.add(self)

    def open(self, store: "Store") -> None:
        """Publish the address at which the previous rank connects."""
        try:
            if socket.has_dualstack_ipv6():
                self._listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
            else:
                self._listener = socket.create_server(("", 0))
        except OSError as error:
            get_logger().debug(f"No port for the previous rank: {error}")
            return
        self._listener.setblocking(False)
        port = self._listener.getsockname()[1]
        store.set(self._own_key, json.dumps([self._host, port, self._token.hex()]))

    def connect(self, store: "Store") -> None:
        """Connect to the next rank, once it has published its address."""
        if self._is_next_called or not store.check([self._next_key]):
            return
        self._is_next_called = True
        host, port, token = json.loads(store.get(self._next_key))
        try:
            line = socket.create_connection((host, port), timeout=_CONNECT_SECONDS)
            line.sendall(bytes.fromhex(token))
        except OSError as error:
            get_logger().debug(f"No connection to rank {self._next_rank} at {host}:{port}: {error}")
            return
        self._keep(line, self._next_rank)

    def poll(self) -> None:
        """Accept the connection of the previous rank, and find the connections that have ended."""
        self._accept()
        for line, rank in list(self._lines.items()):
            message = _receive(line, 1)
            if message is None:
                continue
            if message != _FAREWELL:
                self.cut_ranks.add(rank)
            line.close()
            del self._lines[line]

    def close(self, *, has_finished: bool) -> None:
        """Close the connections, with a farewell if this rank has finished."""
        for line in self._lines:
            if has_finished:
                try:
                    line.send(_FAREWELL)
                except OSError as error:  # the neighbor was faster
                    get_logger().debug(f"No farewell to a neighbor: {error}")
            line.close()
        self._lines.clear()
        self._stop_listening()

    def _accept(self) -> None:
        """Accept a caller, and keep it as the previous rank if it sends the token."""
        if self._listener is None:
            return
        try:
            caller, _ = self._listener.accept()
        except OSError:  # nobody has called, or the caller has ended
            pass
        else:
            caller.setblocking(False)
            self._callers.append(caller)
        for caller in list(self._callers):  # a copy, from which the loop removes
            token = _receive(caller, len(self._token))
            if token is None:  # it has not sent it yet
                continue
            self._callers.remove(caller)
            if token == self._token:
                self._keep(caller, self._previous_rank)
                self._stop_listening()  # there is one previous rank
                return
            caller.close()

    def _keep(self, line: socket.socket, rank: int) -> None:
        """Keep a connection to a neighbor, and let the kernel probe it."""
        line.setblocking(False)
        if sys.platform == "linux":
            line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _PROBES.items():
                line.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._lines[line] = rank

    def _stop_listening(self) -> None:
        """Close the port, and the connections that have sent no token."""
        for caller in self._callers:
            caller.close()
        self._callers.clear()
        if self._listener is not None:
            self._listener.close()
            self._listener = None


_all_lifelines: weakref.WeakSet[Lifelines] = weakref.WeakSet()  # of this process


def _close_in_child() -> None:
    """Close a fork's copies of the connections, which would outlive the rank."""
    for lifelines in list(_all_lifelines):
        lifelines.close(has_finished=False)


os.register_at_fork(after_in_child=_close_in_child)


def _receive(line: socket.socket, size: int) -> bytes | None:
    """Return what has arrived: None if nothing has, no bytes if the connection has ended."""
    try:
        return line.recv(size)
    except BlockingIOError:
        return None
    except OSError:  # reset by the other side, or no reply to probes
        return b""


def _own_host(host: str, port: int) -> str | None:
    """Return the address at which other ranks reach this machine; None if the store does not accept connections yet.

    torch would print a warning per failed attempt.
    """
    try:
        with socket.create_connection((host, port), timeout=5) as connection:
            address: str = connection.getsockname()[0]
    except OSError:
        return None
    # Only the machine of the store reaches it by a loopback address; others know it by the store's name.
    without_zone = address.partition("%")[0]  # IPv6 addresses of a link name their interface after a %
    if ipaddress.ip_address(without_zone).is_loopback:
        return host
    return address


def list_ranks(ranks: Iterable[int]) -> str:
    """Return ranks in words: "rank 1", "ranks 0, 2 and 3", "ranks 0-6 and 8"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = []
    for run in runs:
        if len(run) > 2:  # two ranks read better as "0 and 1"
            parts.append(f"{run[0]}-{run[-1]}")
        else:
            parts += [str(rank) for rank in run]
    if len(parts) == 1:
        noun = "rank" if len(runs[0]) == 1 else "ranks"
        return f"{noun} {parts[0]}"
    return f"ranks {', '.join(parts[:-1])} and {parts[-1]}"


def describe_stall(beats: dict[int, Beat], silent: set[int], now: float) -> str:
    """Return one sentence: the stalled ranks and their location.

    If there are silent ranks, they are the stalled ones; else those of :func:`_find_stalled_ranks`.

    Args:
        beats: beats of all ranks that have published a beat.
        silent: ranks without a recent heartbeat.
        now: seconds since the epoch.
    """
    stalled = silent or _find_stalled_ranks(beats)
    first = min(stalled)
    beat = beats[first]
    log = run_log_path(first)
    position = place(beat.step, beat.phase)
    if beat.source_line:
        position += f", at {beat.source_line}"
    seconds = round(max(0.0, now - beat.moved_at))  # the clock of another machine may be ahead
    have = "has" if len(stalled) == 1 else "have"
    text = f"{list_ranks(stalled)} {have} "
    if silent:
        text += f"given no sign of life for {seconds} s, last seen {position}"
        advice = "the process is stopped or its machine is gone"
        if log:
            advice += f"; see {log} for its last words"
    elif beat.end:
        text += f"ended with {beat.end} {seconds} s ago, {position}"
        advice = f"see {log or 'its output'}"
    else:
        text += f"not moved for {seconds} s, {position}"
        advice = f"its stack is in {log or 'its output'}"
    peers = sorted(beats.keys() - stalled)
    waiting = [rank for rank in peers if not beats[rank].end]
    finished = [rank for rank in peers if beats[rank].end == FINISHED]
    failed = [rank for rank in peers if beats[rank].failed]
    clauses = []
    if waiting:
        last_beat = beats[waiting[-1]]  # stands for all of them
        verb = "waits" if len(waiting) == 1 else "wait"
        clauses.append(f"{list_ranks(waiting)} {verb} {place(last_beat.step, last_beat.phase)}")
    if finished:
        have = "has" if len(finished) == 1 else "have"
        clauses.append(f"{list_ranks(finished)} {have} finished")
    if failed:  # beside a silent rank, which may be what it waited for
        clauses.append(f"{list_ranks(failed)} ended with {beats[failed[0]].end}")
    if clauses:
        text += f", while {' and '.join(clauses)}"
    return f"{text[0].upper()}{text[1:]}: {advice}."


def _find_stalled_ranks(beats: dict[int, Beat]) -> set[int]:
    """Return the ranks that failed, or else are behind the others, or else do not wait in a collective."""
    failed = {rank for rank, beat in beats.items() if beat.failed}
    if failed:
        return failed
    fewest_moves = min(beat.moves for beat in beats.values())
    behind = {rank for rank, beat in beats.items() if beat.moves == fewest_moves}
    if len(behind) == 1:
        return behind
    not_waiting = {rank for rank in behind if not beats[rank].waits}
    return not_waiting or behind


def machine_name() -> str:
    """Return node rank and host name of this process."""
    return f"machine {os.environ.get('GROUP_RANK', '0')} ({platform.node()})"


def is_connection_error(error: BaseException | None) -> bool:
    """Return whether a collective or the store failed: an error of torch, or of gloo, which has no error class."""
    from torch.distributed import DistError

    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def lost_rank_error(lost: dict[int, Beat] | None, address: str) -> LostRankError:
    """Return the error for ranks that are gone or failed.

    Args:
        lost: last beats of these ranks; None if the store does not answer.
        address: address of the store.
    """
    if lost is None:
        return LostRankError(
            f"Machine 0, which serves the store of all ranks at {address}, does not answer: rank 0 or its torchrun "
            f"agent was killed, or the machine or network failed; {_resume_advice()}",
            EXIT_REQUEUE,
        )
    first = min(lost)
    beat = lost[first]
    ranks = list_ranks(lost)
    machines = sorted({beat.machine for beat in lost.values() if beat.machine})
    if machines:
        ranks += f" on {' and '.join(machines)}"
    ranks = f"{ranks[0].upper()}{ranks[1:]}"
    position = place(beat.step, beat.phase)
    if beat.failed:
        # The exit code of the failed rank: that of user errors, or Python's for any other exception.
        if beat.error:  # a user error
            reason = beat.error
            exit_code = UserError.exit_code
        else:
            reason = f"see {run_log_path(first) or 'its output'}."
            exit_code = 1
        error = LostRankError(f"{ranks} ended with {beat.end}, {position}: {reason}", exit_code)
        # Ranks that fail log their error on their own machine, where it is not logged again.
        error.is_reported = all(beat.machine == machine_name() for beat in lost.values())
        return error
    verb = "is" if len(lost) == 1 else "are"
    return LostRankError(
        f"{ranks} {verb} gone, last seen {position}: the process or its torchrun agent was killed, or the machine or "
        f"network failed; {_resume_advice()}",
        EXIT_REQUEUE,
    )


def _resume_advice() -> str:
    """Return what starts the run again: torchrun by itself, or the user."""
    num_restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    max_restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if num_restarts < max_restarts:
        return "torchrun starts all ranks again, as soon as there are enough machines."
    return "run the same command on all machines with resume_from_checkpoint=True to continue from the last checkpoint."
