"""Ending a run that stands still, with a sentence that says who keeps the others waiting."""

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

import torch.distributed as dist

from torchtune.training.supervise._heartbeats import FINISHED, Beat, Heartbeats, explain
from torchtune.utils import (
    LOOP_PHASES,
    Activity,
    dump_stacks,
    dump_stacks_after,
    get_logger,
    get_rank,
    note_in_run_log,
    set_collective_timeout,
)

if TYPE_CHECKING:
    from torchtune.training.parallel._parallel_dims import ParallelDims

# What a process that stands still ends with; neither torch nor Python use it.
HANG_EXIT_CODE = 76
# Names of threads that write checkpoints begin so.
WRITER = "checkpoint"
_lives = itertools.count()  # of this process; the others, which run the same program, count alike


class Watchdog:
    """Inside the block, a process that shows no sign of life for ``timeout`` seconds, nor does any other, is ended.

    One sentence (on the screen of the first to find out, and in all log files) says which ranks are behind and where;
    every process writes the stacks of its threads into its log file and exits with code 76. torch's own time limit for
    collectives is set to twice as long, so that this message comes first.

    A thread looks at ``activity`` once a second; the loop does nothing for it, and no step has a collective more.
    The processes know of each other through the store of the process group, from when there is one. Signs of life in
    the loop are batches, forward passes, steps, and the beginning and end of validation; in set-up, while a checkpoint
    is loaded or written and at the end, any progress of the code.

    Args:
        activity: of this process, see :attr:`Throughput.activity`.
        dims: not looked at any more; the process group is.
        timeout: seconds; None watches nothing. It must be longer than anything in the loop takes between two signs of
            life: compiling the model, loading a step's examples.

    Raises:
        ValueError: ``timeout`` is not above 0.
    """

    def __init__(self, activity: Activity, dims: "ParallelDims | None", timeout: float | None) -> None:
        if timeout is not None and timeout <= 0:
            raise ValueError(f"timeout must be above 0, got {timeout}.")
        self._activity = activity
        self._timeout = timeout
        self._stopped = threading.Event()
        self._beats: Heartbeats | None = None
        self._number = self._groups = 0
        self._since = 0.0  # no move before counts
        self._spot: list[tuple[object, int]] = []

    def __enter__(self) -> "Watchdog":
        if self._timeout is None:
            return self
        self._life = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_lives)}"
        self._rank, self._interval = get_rank(), min(1.0, self._timeout / 20)
        self._watched = threading.get_ident()
        self._meet()
        self._since = time.monotonic()
        dump_stacks_after(2 * self._timeout)  # for code that lets no thread run, not even this one
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timeout is None:
            return
        self._stopped.set()
        self._thread.join()
        dump_stacks_after(None)
        if self._beats is not None:
            self._beats.mine = self._beat(left=FINISHED if kind is None else kind.__name__)
            self._beats.leave(seconds=2.0)

    def _meet(self) -> None:
        """Give new process groups more time, and show this process to the others as soon as it can meet them."""
        if not (dist.is_available() and dist.is_initialized()):
            return
        self._groups = set_collective_timeout(2 * self._timeout + 60, self._groups)
        size = dist.get_world_size()
        if self._beats is None and size > 1 and "MASTER_ADDR" in os.environ:
            self._rank, self._interval = dist.get_rank(), max(self._interval, size / 500)
            self._beats = Heartbeats(self._rank, size, self._interval, self._life, self._beat())

    def _beat(self, still: bool = False, left: str = "") -> Beat:
        activity = self._activity
        self._number += 1
        moved = time.time() - (time.monotonic() - activity.moved)
        where, waits = _where(self._watched) if still else ("", False)
        return Beat(
            number=self._number,
            step=activity.step,
            phase=activity.phase,
            moves=activity.moves,
            moved=moved,
            stirs=activity.stirs,
            waits=waits,
            where=where,
            left=left,
        )

    def _watch(self) -> None:
        timeout, last = self._timeout, time.monotonic()
        armed = last
        while not self._stopped.wait(self._interval):
            now = time.monotonic()
            if now - last > max(timeout / 4, 5 * self._interval):  # it is we who were stopped: nobody could move
                self._since = now
            last = now
            if now - armed > timeout / 4:
                dump_stacks_after(2 * timeout)
                armed = now
            self._meet()
            self._look_for_progress()
            still = now - max(self._activity.moved, self._since)
            beats = self._beats
            if beats is not None:
                beats.mine = self._beat(still > timeout / 2)
                beats.looking = still > timeout / 2
            if (still > timeout and self._all_stand(now)) or (still > timeout / 2 and beats is not None and beats.over):
                self._end(now)

    def _look_for_progress(self) -> None:
        """Outside of the loop, code that is elsewhere than before is a sign of life: it takes long, and says nothing.

        At the end the thread that writes the last checkpoint is looked at, too: this process waits for it.
        """
        spot: list[tuple[object, int]] = []
        if self._activity.phase not in LOOP_PHASES:
            frames = sys._current_frames()
            writers = [thread.ident for thread in threading.enumerate() if thread.name.startswith(WRITER)]
            for frame in (frames.get(thread) for thread in (self._watched, *writers)):
                while frame is not None:
                    spot.append((frame.f_code, frame.f_lasti))
                    frame = frame.f_back
        if spot and spot != self._spot:
            self._activity.stir()
        self._spot = spot

    def _lost(self, now: float) -> bool:
        """Whether the store has not answered since this process began to ask.

        It may take seconds: for every connection it looks up a name, and some machines' names are not served well.
        """
        return now - self._beats.answered > self._timeout / 2

    def _all_stand(self, now: float) -> bool:
        if self._beats is None or self._lost(now):
            return True
        seen = list(self._beats.seen.values())
        return all(now - other.moved > self._timeout / 4 for other in seen)

    def _end(self, now: float) -> None:
        """Say why, and leave; never returns, whatever lock the stopped code may hold."""
        _within(5.0, lambda: dump_stacks("The run stands still; this is where this process is:"))
        sentence = self._sentence(now)
        alone = self._beats is None
        first = alone or self._lost(now) or self._beats.tell(seconds=5 * self._interval + 2)
        _within(5.0, lambda: get_logger().error(sentence) if first else note_in_run_log(sentence))
        if not alone:
            time.sleep(5 * self._interval)  # for the others to write where they are
        _within(1.0, sys.stdout.flush)
        _within(1.0, sys.stderr.flush)
        os._exit(HANG_EXIT_CODE)

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
                    "answer: it is stopped or gone, and may be what all wait for."
                )
        return explain(beats, silent, time.time())


def _within(seconds: float, function: Callable[[], object]) -> None:
    """Run what might wait for a lock that is never given back, and go on without it after ``seconds``."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(seconds)


def _where(thread: int) -> tuple[str, bool]:
    """(innermost line of code that is not torch's, whether the thread waits for other processes)."""
    frame: FrameType | None = sys._current_frames().get(thread)
    waits, depth, inside = False, 0, f"{os.sep}torch{os.sep}"
    while frame is not None and inside in frame.f_code.co_filename:
        waits = waits or (depth < 4 and f"{inside}distributed{os.sep}" in frame.f_code.co_filename)
        frame, depth = frame.f_back, depth + 1
    if frame is None:
        return "", waits
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}", waits
