"""When a run saves, and when it stops."""

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch

from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, BatchLoader
from torchtune.training.measure._throughput import Throughput
from torchtune.training.parallel._parallel_dims import ParallelDims
from torchtune.training.supervise._signals import StopSignal
from torchtune.training.supervise._step_guard import StepGuard
from torchtune.utils import get_logger

# sysexits.h: a temporary failure, try again; schedulers are told to queue a job again that ends so.
EXIT_REQUEUE = 75
_EXIT_CODES = {signal.SIGINT: 128 + signal.SIGINT, signal.SIGTERM: EXIT_REQUEUE}


class Step(NamedTuple):
    """What a step trains on.

    Attributes:
        batches: this process's micro-batches.
        num_tokens: of all processes.
        num_labels: of all processes.
        num_terms: of all processes: what the loss of the step is a mean over, labels unless a batch says otherwise.
    """

    batches: list[Any]
    num_tokens: int
    num_labels: int
    num_terms: int


class RunControl:
    """The steps of a run, and what asks it to save or to stop: its settings, the clock, a file ``SAVE``, and signals.

    Processes send each other one message a step, an all-reduce of a few numbers, when the guard asks for the loss. It
    carries what is decided about the step that ends (loss, whether all is finite), what rank 0's clock and file and
    any process's signals ask for, and the counts of the step that comes, which is loaded for that before the host
    waits for the device. Only the first step of an epoch, or after a resume, has its counts sent by themselves.

    Inside the block the first SIGTERM or SIGINT on any process is noticed with the message of a step, and obeyed after
    that step; the second ends that process at once.

    Args:
        dims: the processes.
        output_dir: a file named ``SAVE`` in it is removed, and asks for a checkpoint.
        every_n_steps: of checkpoints; without it there is one after every epoch.
        every_n_minutes: since the last checkpoint, or None.
        clock: seconds, monotonic.
        guard: its question for the loss becomes the message; without it :meth:`after_step` sends one.
        throughput: is told of the time that loading takes.

    Attributes:
        save_due: whether a checkpoint was asked for after this step, by whatever but the end of an epoch.
        finished: whether this step is the last of the run.
        exit_code: of the process that is asked to stop: 75 after SIGTERM, so that a scheduler queues it again, 130
            after SIGINT; 0 as long as there was no signal.
    """

    def __init__(
        self,
        dims: ParallelDims,
        output_dir: str | Path,
        every_n_steps: int | None = None,
        every_n_minutes: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        guard: StepGuard | None = None,
        throughput: Throughput | None = None,
    ) -> None:
        self._dims, self._file = dims, Path(output_dir) / "SAVE"
        self._steps, self._clock = every_n_steps, clock
        self._seconds = None if every_n_minutes is None else 60 * every_n_minutes
        self._saved_at = clock()
        self._signals = StopSignal()
        self._throughput = Throughput(dims=dims) if throughput is None else throughput
        self._loader: BatchLoader | None = None
        self._epochs = 0
        self._counts: list[int] | None = None  # tokens, labels and terms of the step that comes
        self._asked = False
        self.save_due = False
        self.finished = False
        self.exit_code = 0
        if guard is not None:
            guard.exchange = self._exchange

    @property
    def stopping(self) -> bool:
        """Whether the run was asked to stop."""
        return self.exit_code != 0

    @property
    def ending(self) -> bool:
        """Whether no step comes after this one: the checkpoint that is due is the last."""
        return self.stopping or self.finished

    def steps(self, loader: BatchLoader, epochs: int) -> Iterator[Step]:
        """The steps from the loader's position to the end of the last epoch, or until the run stops.

        Args:
            loader: of the training data.
            epochs: of the whole run.
        """
        self._loader, self._epochs = loader, epochs
        while loader.epoch < epochs and not self.stopping:
            self._counts = None
            for batches in self._throughput.loading(loader):
                counts = self._dims.sum(*_count(batches)) if self._counts is None else self._counts
                yield Step(batches, *counts)
                if self.stopping:
                    return

    def _exchange(self, numbers: list[Any], bad: torch.Tensor | bool) -> tuple[list[float], bool]:
        """The message of a step; see :class:`StepGuard`."""
        upcoming = self._throughput.load_ahead(self._loader)
        counts = _count(upcoming or [])
        sums, (bad, *wishes) = self._dims.exchange([*counts, *numbers], [bad, *self._wishes()])
        self._counts = sums[: len(counts)] if upcoming is not None else None
        self._obey(wishes)
        return sums[len(counts) :], bad

    def _wishes(self) -> list[bool]:
        """Whether this process asks for a checkpoint, and for a stop by each of the signals."""
        found = [self._signals.number == number for number in _EXIT_CODES]
        return [self._dims.is_main and self._is_asked(), *found]

    def _is_asked(self) -> bool:
        if self._file.exists():
            self._file.unlink(missing_ok=True)
            return True
        return self._seconds is not None and self._clock() - self._saved_at >= self._seconds

    def _obey(self, wishes: list[bool]) -> None:
        self._asked = self._asked or wishes[0]
        self.exit_code = next((code for code, found in zip(_EXIT_CODES.values(), wishes[1:], strict=True) if found), 0)

    def checkpoint_due(self, step: int) -> str | None:
        """The name of the checkpoint that is to be written after a step, ``epoch_<n>`` or ``step_<n>``; or None.

        Args:
            step: how many were done.
        """
        if self._dims.world_size == 1:  # needs no message, and so does not miss what came after it
            self._obey(self._wishes())
        epoch_ends = self._loader.at_epoch_end
        self.finished = epoch_ends and self._loader.epoch == self._epochs - 1
        self._decide(step)
        if epoch_ends and self._steps is None and (self.finished or not self.stopping):
            self._saved_at = self._clock()
            return f"epoch_{self._loader.epoch}"
        return f"step_{step}" if self.save_due or self.finished else None

    def after_step(self, step: int) -> None:
        """Agree with the other processes on ``save_due``, by a message of its own, where no guard was given.

        Args:
            step: how many were done.
        """
        self._obey(self._dims.exchange((), self._wishes())[1])
        self._decide(step)

    def _decide(self, step: int) -> None:
        self.save_due = self._asked or self.stopping or (self._steps is not None and step % self._steps == 0)
        self._asked = False
        if self.save_due:
            self._saved_at = self._clock()

    def finish(self, step: int, total: int) -> int:
        """The exit code, after everything is saved; a run that stopped early says how to go on.

        Args:
            step: how many were done.
            total: steps of the whole run.
        """
        if step >= total:
            return 0
        if self._dims.is_main:
            get_logger().warning(
                f"Stopped after step {step} of {total}; everything is saved in {self._file.parent}: run the same "
                "command with resume_from_checkpoint=True to continue."
            )
        return self.exit_code

    def __enter__(self) -> "RunControl":
        self._signals.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._signals.__exit__(kind, error, trace)
        self._throughput.activity.move("closing")


def _count(batches: list[Mapping[str, torch.Tensor]]) -> tuple[int, int, int]:
    """Tokens, labels and terms of this process's micro-batches."""
    tokens = sum(batch["tokens"].numel() for batch in batches)
    labels = [int((batch["labels"] != CROSS_ENTROPY_IGNORE_IDX).sum()) for batch in batches]
    others = [getattr(batch, "terms", None) is not None for batch in batches]
    terms = sum(batch.num_terms if other else n for batch, n, other in zip(batches, labels, others, strict=True))
    return tokens, sum(labels), terms
