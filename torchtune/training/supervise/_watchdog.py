"""Ending a run that stalls, with one sentence that names the ranks behind."""

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

from torchtune.training._distributed import is_distributed
from torchtune.training._settings_view import SettingsView
from torchtune.training.measure._throughput import Throughput
from torchtune.training.parallel._parallel_dims import ParallelDims
from torchtune.training.supervise._heartbeats import BEREFT, FINISHED, ORPHANED, Beat, Heartbeats, explain
from torchtune.training.supervise._lost_ranks import agent_pid, explain_loss, is_connection_error, machine
from torchtune.training.supervise._out_of_memory import explain_out_of_memory
from torchtune.training.supervise._run_control import EXIT_REQUEUE
from torchtune.utils import (
    LOOP_PHASES,
    LOST,
    Activity,
    LostRankError,
    UserError,
    dump_stacks,
    dump_stacks_after,
    first_to_say,
    get_logger,
    get_rank,
    note_in_run_log,
    place,
    set_collective_timeout,
    watch_activity,
    watched_activity,
)
from torchtune.utils._garbage import collect_as_usual

T = TypeVar("T")
# Exit code of a stalled rank; neither torch nor Python use it.
HANG_EXIT_CODE = 76
# Seconds without progress after which a rank ends if another one has failed.
_QUIET = 10.0
# Threads that write checkpoints have names with this prefix.
WRITER = "checkpoint"
_lives = itertools.count()  # of this process; equal on all ranks, which run the same program


def watched(recipe_main: Callable[[Any], T]) -> Callable[[Any], T]:
    """Decorator of ``recipe_main``: a :class:`Watchdog` over set-up, loop and end.

    The timeout is ``hang_timeout_minutes`` of the settings; None disables it.
    """

    @functools.wraps(recipe_main)
    def run(cfg: Any) -> T:
        activity, timeout = Activity(None, "set-up"), _seconds(SettingsView.of(cfg).hang_timeout_minutes)
        with watch_activity(activity), Watchdog(activity, None, timeout):
            return recipe_main(cfg)

    return run


@contextmanager
def watch_run(
    cfg: Any, dims: ParallelDims, throughput: Throughput, hang_timeout_minutes: float | None
) -> Iterator[None]:
    """Context manager of the training loop: :func:`explain_out_of_memory`, and a :class:`Watchdog` unless
    :func:`watched` has started one.

    Args:
        cfg: settings of the recipe.
        dims: the device mesh.
        throughput: has the activity of this process.
        hang_timeout_minutes: timeout of the watchdog; None disables it.

    Raises:
        OutOfMemoryError: see :func:`explain_out_of_memory`.
    """
    collect_as_usual()  # set-up has ended
    activity = throughput.activity
    is_watched = watched_activity() is activity
    watchdog = nullcontext() if is_watched else Watchdog(activity, dims, _seconds(hang_timeout_minutes))
    with watchdog, explain_out_of_memory(cfg, activity, dims):
        yield


def _seconds(minutes: float | None) -> float | None:
    return None if minutes is None else 60 * minutes


class Watchdog:
    """Context manager: ends this process if no rank shows a sign of life for ``timeout`` seconds, and if the process
    that started it dies.

    The first rank to find out prints one sentence that names the ranks behind and their place in the code; it is also
    in every log file. Every rank writes its stacks into its log file and exits with code 76. The timeout of torch's
    collectives is set to more than twice ``timeout``, so that this message comes first.

    A thread reads ``activity`` once a second: the loop does no work for it, and a step has no further collective.
    Ranks exchange heartbeats through the store of the process group. Signs of life in the loop are batches, forward
    passes, steps, and the beginning and end of validation; in other phases, any progress of the code.

    If a collective fails because another rank is gone, the block raises an error that names that rank. If torchrun's
    agent dies, the process exits with code 75: nobody would collect it, and a new run would meet it.

    Args:
        activity: of this process, see :attr:`Throughput.activity`.
        dims: not used.
        timeout: seconds; None lets a run stall for ever. It must be longer than any time between two signs of life,
            such as compilation or loading of data.

    Raises:
        LostRankError: another rank is gone or failed, and a collective of this one failed for it.
        ValueError: ``timeout`` is not above 0.

    Example:
        >>> activity = torchtune.utils.Activity()
        >>> with torchtune.training.Watchdog(activity, None, timeout=60):
        ...     activity.sign()
    """

    def __init__(self, activity: Activity, dims: ParallelDims | None, timeout: float | None) -> None:
        if timeout is not None and timeout <= 0:
            raise ValueError(f"timeout must be above 0, got {timeout}.")
        self._activity, self._timeout = activity, math.inf if timeout is None else timeout
        self._agent = agent_pid()
        self._idle = timeout is None and self._agent is None and not is_distributed()
        self._stopped = threading.Event()
        self._beats: Heartbeats | None = None
        self._number = self._groups = 0
        self._since = 0.0  # signs of life before this time do not count
        self._spot: list[tuple[object, int]] = []

    def __enter__(self) -> "Watchdog":
        if self._idle:
            return self
        self._life = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_lives)}"
        self._rank, self._interval = get_rank(), min(1.0, self._timeout / 20)
        self._watched = threading.get_ident()
        self._meet()
        self._since = time.monotonic()
        self._arm()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if self._idle:
            return
        loss = self._loss() if is_connection_error(error) else None
        self._stopped.set()
        self._thread.join()
        dump_stacks_after(None)
        words = str(error) if isinstance(error, UserError) else ""
        self._leave(BEREFT if loss else FINISHED if kind is None else kind.__name__, words)
        if loss is not None:
            raise loss from error

    def _loss(self) -> LostRankError | None:
        """The ranks for which a collective of this one failed; None if all are there."""
        if self._beats is None:
            return None
        self._activity.sign()
        lost = self._beats.missing(min(10.0, self._timeout / 4), patience=min(60.0, self._timeout / 2))
        return explain_loss(lost, self._beats.address) if lost or lost is None else None

    def _leave(self, left: str, words: str = "") -> None:
        if self._beats is not None:
            self._beats.mine = replace(self._beat(left=left), words=words)
            self._beats.leave(seconds=2.0)

    def _arm(self) -> None:
        if self._timeout < math.inf:
            dump_stacks_after(2 * self._timeout)  # for code that lets no thread run, not even this one

    def _meet(self) -> None:
        """Start the heartbeats, and set the timeout of new process groups."""
        size = int(os.environ["WORLD_SIZE"]) if is_distributed() else 1
        if self._beats is None and size > 1:
            self._interval = max(self._interval, size / 500)
            self._beats = Heartbeats(self._rank, size, self._interval, self._life, self._beat())
        if dist.is_available() and dist.is_initialized() and self._timeout < math.inf:
            self._groups = set_collective_timeout(2 * self._timeout + 60, self._groups)

    def _beat(self, still: bool = False, left: str = "") -> Beat:
        now = self._activity
        self._number += 1
        moved = time.time() - (time.monotonic() - now.moved)
        where, waits = _where(self._watched) if still else ("", False)
        return Beat(self._number, now.step, now.phase, now.moves, moved, now.signs, waits, where, left, machine())

    def _watch(self) -> None:
        timeout = self._timeout
        armed = last = time.monotonic()
        while not self._stopped.wait(self._interval):
            now = time.monotonic()
            if self._agent not in (None, os.getppid()):
                self._end_orphaned()
            if now - last > max(timeout / 4, 5 * self._interval):  # this process was suspended
                self._since = now
            last = now
            if now - armed > timeout / 4:
                self._arm()
                armed = now
            self._meet()
            self._look_for_progress()
            still = now - max(self._activity.moved, self._since)
            beats = self._beats
            if beats is not None:
                beats.mine = self._beat(still > timeout / 2)
                beats.looking = still > timeout / 2
            if beats is not None and still > min(_QUIET, timeout / 2) and (ended := beats.ended()):
                self._end_bereft(explain_loss(ended, beats.address))
            if (still > timeout and self._all_stand(now)) or (still > timeout / 2 and beats is not None and beats.over):
                self._end(now)

    def _look_for_progress(self) -> None:
        """Outside the loop, a change of the stack is a sign of life, also of threads that write a checkpoint."""
        spot: list[tuple[object, int]] = []
        if self._activity.phase not in LOOP_PHASES:
            frames = sys._current_frames()
            writers = [thread.ident for thread in threading.enumerate() if thread.name.startswith(WRITER)]
            for frame in (frames.get(thread) for thread in (self._watched, *writers)):
                while frame is not None:
                    spot.append((frame.f_code, frame.f_lasti))
                    frame = frame.f_back
        if spot and spot != self._spot:
            self._activity.sign()
        self._spot = spot

    def _lost(self, now: float) -> bool:
        """Whether the store does not answer; a slow name server may delay it by seconds."""
        return now - self._beats.answered > self._timeout / 2

    def _all_stand(self, now: float) -> bool:
        if self._beats is None or self._lost(now):
            return True
        return all(now - other.moved > self._timeout / 4 for other in list(self._beats.seen.values()))

    def _end(self, now: float) -> None:
        """Log the reason and exit, even if the stalled code holds a lock."""
        _within(5.0, lambda: dump_stacks("The run stands still; this is where this process is:"))
        sentence = self._sentence(now)
        beats = self._beats
        first = beats is None or self._lost(now) or beats.tell(seconds=5 * self._interval + 2)
        _within(5.0, lambda: get_logger().error(sentence) if first else note_in_run_log(sentence))
        if beats is not None:
            time.sleep(5 * self._interval)  # until the other ranks have written their stacks
        _exit(HANG_EXIT_CODE)

    def _end_bereft(self, loss: LostRankError) -> None:
        """Exit, as another rank has ended for which this one waits."""
        first = first_to_say(LOST)  # the rank that failed may not come to say it
        _within(5.0, lambda: get_logger().error(str(loss)) if first else note_in_run_log(str(loss)))
        _within(5.0, lambda: self._leave(BEREFT))
        _exit(loss.exit_code)

    def _end_orphaned(self) -> None:
        """Exit: files are complete or have temporary names at any time, so that nothing is lost."""
        sentence = (
            f"Rank {self._rank} on {machine()} ends {place(self._activity.step, self._activity.phase)}, because "
            f"process {self._agent}, which started it, has died: run the same command with resume_from_checkpoint=True "
            "to continue from the last checkpoint."
        )
        _within(5.0, lambda: get_logger().error(sentence))
        _within(5.0, lambda: self._leave(ORPHANED))
        _exit(EXIT_REQUEUE)

    def _sentence(self, now: float) -> str:
        beats, silent = {self._rank: self._beat(still=True)}, set()
        if self._beats is not None:
            for rank, other in list(self._beats.seen.items()):
                beats[rank] = other.beat
                if now - other.beaten > self._timeout / 4 and not other.beat.left:
                    silent.add(rank)
            if self._lost(now):
                mine = explain({self._rank: beats[self._rank]}, set(), time.time()).rstrip(".")
                return (
                    f"{mine}; the process at {self._beats.address} through which ranks know of each other does not "
                    "answer: rank 0 or its torchrun agent is stopped or gone, and may be what all wait for."
                )
        return explain(beats, silent, time.time())


def _exit(code: int) -> None:
    """End this process, whatever its other threads do."""
    _within(1.0, sys.stdout.flush)
    _within(1.0, sys.stderr.flush)
    os._exit(code)


def _within(seconds: float, function: Callable[[], object]) -> None:
    """Run a function that may wait for a lock, for ``seconds`` at most."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(seconds)


def _where(thread: int) -> tuple[str, bool]:
    """(innermost line of code outside torch, whether the thread waits in a collective)."""
    frame: FrameType | None = sys._current_frames().get(thread)
    waits, depth, inside = False, 0, f"{os.sep}torch{os.sep}"
    while frame is not None and inside in frame.f_code.co_filename:
        waits = waits or (depth < 4 and f"{inside}distributed{os.sep}" in frame.f_code.co_filename)
        frame, depth = frame.f_back, depth + 1
    if frame is None:
        return "", waits
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}", waits
