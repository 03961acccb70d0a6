"""Watchdog: end a stalled run with one sentence that names the stalled ranks."""

import functools
import itertools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import FrameType
from typing import Any, TypeVar

import torch.distributed as dist

from torchtune.config import SettingsView
from torchtune.supervision._heartbeats import (
    FINISHED,
    ORPHANED,
    PEER_LOST,
    Beat,
    Heartbeats,
    describe_stall,
    is_connection_error,
    lost_rank_error,
    machine_name,
)
from torchtune.supervision._out_of_memory import explain_out_of_memory
from torchtune.supervision._throughput import Throughput
from torchtune.training import is_distributed
from torchtune.training.parallel import ParallelDims
from torchtune.utils import (
    AGENT_VARIABLE,
    EXIT_REQUEUE,
    HANG_EXIT_CODE,
    LOOP_PHASES,
    LOST_RANK,
    Activity,
    LostRankError,
    UserError,
    dump_stacks,
    dump_stacks_after,
    get_logger,
    get_rank,
    is_first_to_print,
    note_in_run_log,
    place,
    set_collective_timeout,
    watch_activity,
    watched_activity,
)

T = TypeVar("T")
# Seconds without progress after which a rank ends if another rank has failed.
_QUIET_SECONDS = 10.0
# Minimum share of a CPU core that counts as progress outside the loop; code that polls uses less.
_MIN_CPU_SHARE = 0.002
# Logged once per machine, for any number of ranks.
_STALLED = "the run stalls"
_watchdog_numbers = itertools.count()  # of this process; equal on all ranks, which run the same program


def watched(recipe_main: Callable[[Any], T]) -> Callable[[Any], T]:
    """Decorate ``recipe_main`` with a :class:`Watchdog` over set-up, loop and end.

    The timeout is the setting ``hang_timeout_minutes``; None disables it.
    """

    @functools.wraps(recipe_main)
    def run(cfg: Any) -> T:
        activity = Activity(None, "set-up")
        timeout = _to_seconds(SettingsView.of(cfg).hang_timeout_minutes)
        with watch_activity(activity), Watchdog(activity, None, timeout):
            return recipe_main(cfg)

    return run


@contextmanager
def watch_run(
    cfg: Any, dims: ParallelDims, throughput: Throughput, hang_timeout_minutes: float | None
) -> Iterator[None]:
    """Context manager for the training loop: :func:`explain_out_of_memory`, and a :class:`Watchdog` if none is active.

    Args:
        cfg: settings of the recipe.
        dims: the device mesh.
        throughput: holds the activity of this process.
        hang_timeout_minutes: timeout of the watchdog; None disables it.

    Raises:
        OutOfMemoryError: see :func:`explain_out_of_memory`.
    """
    activity = throughput.activity
    if watched_activity() is activity:  # by the watchdog of `watched`
        watchdog = nullcontext()
    else:
        watchdog = Watchdog(activity, dims, _to_seconds(hang_timeout_minutes))
    with watchdog, explain_out_of_memory(cfg, activity, dims):
        yield


def _to_seconds(minutes: float | None) -> float | None:
    """Return minutes as seconds, of at most thirty years."""
    if minutes is None:
        return None
    return min(60 * minutes, 1e9)  # which fits in the clocks of torch and Python


class Watchdog:
    """Context manager that ends this process if all ranks stall for ``timeout`` seconds, or if its parent dies.

    A run stalls if no rank shows a sign of life. The first rank of a machine that detects a stall logs one sentence
    with the stalled ranks and their place in the code, which is also written to every log file. Every rank writes its
    stacks to its log file and exits with code 76. The timeout of torch's collectives is set to more than twice
    ``timeout``, so that this message comes first.

    A thread reads ``activity`` once a second; a step needs no additional work and no additional collective. Ranks
    exchange heartbeats through the store of the process group. Signs of life in the loop are batches, forward passes,
    steps, and the beginning and end of validation; in other phases, CPU time of the thread that entered the
    block, and tensors written to a checkpoint.

    If a collective fails because another rank is gone, the block raises an error that names that rank. Collectives of
    NCCL wait instead: if a rank was killed or failed, a rank without a sign of life for 10 seconds logs the same error
    and exits. If torchrun's agent dies, the process exits with code 75; otherwise it would keep running and disturb a
    new run.

    Args:
        activity: activity of this process, see :attr:`Throughput.activity`.
        dims: ignored.
        timeout: seconds; None disables the timeout. It must be longer than any time between two signs of life, such as
            compilation or loading of data.

    Raises:
        LostRankError: a collective failed because another rank is gone or failed.
        ValueError: ``timeout`` is not above 0.

    Example:
        >>> activity = torchtune.utils.Activity()
        >>> with torchtune.supervision.Watchdog(activity, None, timeout=60):
        ...     activity.sign()
    """

    def __init__(self, activity: Activity, dims: ParallelDims | None, timeout: float | None) -> None:
        if timeout is not None and timeout <= 0:
            raise ValueError(f"timeout must be above 0, got {timeout}.")
        self._activity = activity
        self._timeout = math.inf
        if timeout is not None:
            self._timeout = timeout
        self._agent = _agent_pid()
        self._is_disabled = timeout is None and self._agent is None and not is_distributed()
        self._stop_event = threading.Event()
        self._heartbeats: Heartbeats | None = None
        self._beat_number = 0
        self._num_groups = 0
        self._ignore_before = 0.0  # signs of life before this time do not count
        self._last_cpu_time = 0.0
        self._last_written = 0

    def __enter__(self) -> "Watchdog":
        if self._is_disabled:
            return self
        self._run_id = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_watchdog_numbers)}"
        self._rank = get_rank()
        self._interval = min(1.0, self._timeout / 20)
        self._watched_thread = threading.get_ident()
        self._connect()
        self._ignore_before = time.monotonic()
        self._schedule_stack_dump()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if self._is_disabled:
            return
        loss = None
        if is_connection_error(error) and self._heartbeats is not None:
            # The search takes time, which is no stall: both of its limits together are below the timeout.
            self._activity.sign()
            lost_beats = self._heartbeats.find_lost_ranks(
                seconds=min(10.0, self._timeout / 4), patience=min(60.0, self._timeout / 2)
            )
            if lost_beats != {}:  # {}: all ranks are alive; None: the store does not answer
                loss = lost_rank_error(lost_beats, self._heartbeats.address)
        self._stop_event.set()
        self._thread.join()  # else it would replace the last beat
        dump_stacks_after(None)  # cancels the dump
        if loss is not None:
            reason = PEER_LOST
        elif kind is None:
            reason = FINISHED
        else:
            reason = kind.__name__
        message = ""
        if isinstance(error, UserError):
            message = str(error)
        self._publish_exit(reason, message)
        if loss is not None:
            raise loss from error

    def _publish_exit(self, end: str, error: str = "") -> None:
        """Publish a last beat, with the reason of the end and the message of a user error."""
        if self._heartbeats is not None:
            self._heartbeats.own_beat = replace(self._make_beat(end=end), error=error)
            self._heartbeats.stop(seconds=2.0)

    def _schedule_stack_dump(self) -> None:
        """Let C code write the stacks later, for code that blocks all threads, including the watchdog's."""
        if self._timeout < math.inf:
            dump_stacks_after(2 * self._timeout)

    def _connect(self) -> None:
        """Start the heartbeats, and set the timeout of new process groups."""
        size = 1
        if is_distributed():
            size = int(os.environ["WORLD_SIZE"])
        if self._heartbeats is None and size > 1:
            self._interval = max(self._interval, size / 500)  # the store gets at most 500 beats per second
            self._heartbeats = Heartbeats(self._rank, size, self._interval, self._run_id, self._make_beat())
        if dist.is_available() and dist.is_initialized() and self._timeout < math.inf:
            self._num_groups = set_collective_timeout(2 * self._timeout + 60, self._num_groups)

    def _make_beat(self, still: bool = False, end: str = "") -> Beat:
        """Return a new beat of this rank; if it stands ``still``, with its place in the code."""
        activity = self._activity
        line = ""
        waits = False
        if still:  # not otherwise: reading stacks of running threads can crash CPython
            line, waits = _current_line(self._watched_thread)
            if activity.row:
                line = f"{activity.row}, {line}"
        self._beat_number += 1
        return Beat(
            number=self._beat_number,
            step=activity.step,
            phase=activity.phase,
            moves=activity.moves,
            moved_at=time.time() - (time.monotonic() - activity.moved),  # from monotonic time to time since the epoch
            signs=activity.signs,
            waits=waits,
            source_line=line,
            end=end,
            machine=machine_name(),
        )

    def _watch(self) -> None:
        """Look once per interval whether the agent lives and the run goes on; the target of the thread."""
        timeout = self._timeout
        last_check = time.monotonic()
        dump_scheduled_at = last_check
        while not self._stop_event.wait(self._interval):
            now = time.monotonic()
            if self._agent not in (None, os.getppid()):  # the parent of an orphan is another process
                self._exit_orphaned()
            elapsed = now - last_check
            last_check = now
            if elapsed > max(timeout / 4, 5 * self._interval):  # this process was suspended
                self._ignore_before = now
            if now - dump_scheduled_at > timeout / 4:
                self._schedule_stack_dump()
                dump_scheduled_at = now
            self._connect()  # the recipe may have made process groups meanwhile
            self._check_for_progress(elapsed)
            seconds_still = now - max(self._activity.moved, self._ignore_before)
            heartbeats = self._heartbeats
            if heartbeats is not None:
                heartbeats.own_beat = self._make_beat(seconds_still > timeout / 2)
                heartbeats.needs_peer_beats = seconds_still > timeout / 2
                # This rank may wait in a collective of NCCL, which goes on waiting after another rank has ended.
                if seconds_still > min(_QUIET_SECONDS, timeout / 2):
                    failed = heartbeats.failed_ranks()
                    if failed:
                        self._exit_lost_peer(lost_rank_error(failed, heartbeats.address))
                    if heartbeats.is_alone:
                        self._exit_lost_peer(lost_rank_error(None, heartbeats.address))
                # Another rank has found the stall after the whole timeout, so half of it is enough here.
                if seconds_still > timeout / 2 and heartbeats.is_stalled:
                    self._exit_stalled(now)
            if seconds_still > timeout and self._all_ranks_stall(now):
                self._exit_stalled(now)

    def _check_for_progress(self, elapsed: float) -> None:
        """Count CPU time of the watched thread and written tensors as signs of life, outside the loop and rows of data.

        Stacks would tell more, but CPython 3.11 crashes now and then if they are read while their threads run.
        A thread that waits for a device may be busy all the time: after the loss of a rank, that is no sign of life.
        """
        if hasattr(time, "pthread_getcpuclockid"):
            cpu_time = time.clock_gettime(time.pthread_getcpuclockid(self._watched_thread))
        else:  # macOS: all threads but this one
            cpu_time = time.process_time() - time.thread_time()
        written = self._activity.written
        has_computed = cpu_time - self._last_cpu_time > _MIN_CPU_SHARE * elapsed
        has_worked = has_computed or written > self._last_written
        has_lost_rank = self._heartbeats is not None and bool(self._heartbeats.gone_ranks())
        if has_worked and self._activity.phase not in LOOP_PHASES and not self._activity.row and not has_lost_rank:
            self._activity.sign()
        self._last_cpu_time = cpu_time
        self._last_written = written

    def _is_store_lost(self, now: float) -> bool:
        """Return whether the store does not answer; a slow name server may delay it by seconds."""
        return now - self._heartbeats.last_reply > self._timeout / 2

    def _all_ranks_stall(self, now: float) -> bool:
        """Return whether no other rank has moved; without the store, this rank decides alone."""
        if self._heartbeats is None or self._is_store_lost(now):
            return True
        peers = list(self._heartbeats.peer_beats.values())
        return all(now - peer.moved_at > self._timeout / 4 for peer in peers)

    def _exit_stalled(self, now: float) -> None:
        """Log the reason and exit, even if the stalled code holds a lock."""
        _run_with_timeout(5.0, lambda: dump_stacks("The run stands still; this is where this process is:"))
        sentence = self._stall_message(now)
        _report_once(_STALLED, sentence)
        if self._heartbeats is not None:
            self._heartbeats.announce_stall()
            time.sleep(5 * self._interval)  # until the other ranks have written their stacks
        _exit_process(HANG_EXIT_CODE)

    def _exit_lost_peer(self, loss: LostRankError) -> None:
        """Exit because another rank, for which this rank waits, has ended."""
        _report_once(LOST_RANK, str(loss))  # the failed rank may not get to log it
        _run_with_timeout(5.0, lambda: self._publish_exit(PEER_LOST))
        _exit_process(loss.exit_code)

    def _exit_orphaned(self) -> None:
        """Exit because the agent died. Files are always complete or have temporary names, so nothing is lost."""
        sentence = (
            f"Rank {self._rank} on {machine_name()} ends {place(self._activity.step, self._activity.phase)}, because "
            f"process {self._agent}, which started it, has died: run the same command with resume_from_checkpoint=True "
            "to continue from the last checkpoint."
        )
        _run_with_timeout(5.0, lambda: get_logger().error(sentence))
        _run_with_timeout(5.0, lambda: self._publish_exit(ORPHANED))
        _exit_process(EXIT_REQUEUE)

    def _stall_message(self, now: float) -> str:
        """Return a sentence on the ranks that stall, or on the store if it does not answer."""
        own_beat = self._make_beat(still=True)
        beats = {self._rank: own_beat}
        silent = set()
        if self._heartbeats is not None:
            for rank, peer in list(self._heartbeats.peer_beats.items()):
                beats[rank] = peer.beat
                if now - peer.beat_at > self._timeout / 4 and not peer.beat.end:
                    silent.add(rank)
            if self._is_store_lost(now):
                own_stall = describe_stall({self._rank: own_beat}, set(), time.time()).rstrip(".")
                return (
                    f"{own_stall}; the process at {self._heartbeats.address} through which ranks know of each other "
                    "does not answer: rank 0 or its torchrun agent is stopped or gone, and may be what all wait for."
                )
        return describe_stall(beats, silent, time.time())


def _agent_pid() -> int | None:
    """Return the id of the process that started this rank, even if it has died since; None without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    parent = os.getppid()
    agent = int(os.environ.get(AGENT_VARIABLE, "0"))
    if agent == 0:
        return parent
    try:
        os.kill(agent, 0)  # sends no signal, but raises if there is no such process
    except ProcessLookupError:
        return agent  # it has died, so that this process has another parent by now
    except PermissionError:  # it lives, as a process of another user
        pass
    return parent


def _report_once(occasion: str, sentence: str) -> None:
    """Log a sentence if no other rank of this machine has logged that of the occasion; else note it in the log file."""
    if is_first_to_print(occasion):
        _run_with_timeout(5.0, lambda: get_logger().error(sentence))
    else:
        _run_with_timeout(5.0, lambda: note_in_run_log(sentence))


def _exit_process(code: int) -> None:
    """End this process regardless of its other threads."""
    _run_with_timeout(1.0, sys.stdout.flush)
    _run_with_timeout(1.0, sys.stderr.flush)
    os._exit(code)


def _run_with_timeout(seconds: float, function: Callable[[], object]) -> None:
    """Run a function that may wait for a lock, for at most ``seconds``."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(seconds)


def _current_line(thread: int) -> tuple[str, bool]:
    """Return (innermost line of code outside torch, whether the thread waits in a collective)."""
    frame: FrameType | None = sys._current_frames().get(thread)
    folder_of_torch = f"{os.sep}torch{os.sep}"
    waits = False
    depth = 0
    while frame is not None and folder_of_torch in frame.f_code.co_filename:
        # Code of torch.distributed further out, such as FSDP's hooks, calls the rest of the model.
        if depth < 4 and f"{folder_of_torch}distributed{os.sep}" in frame.f_code.co_filename:
            waits = True
        frame = frame.f_back
        depth += 1
    if frame is None:
        return "", waits
    file_name = os.path.basename(frame.f_code.co_filename)
    return f"{file_name}:{frame.f_lineno} in {frame.f_code.co_name}", waits
