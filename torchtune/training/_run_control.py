"""When a run saves, and when it stops."""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from torchtune.training._parallel_dims import ParallelDims
from torchtune.training._signals import StopSignal
from torchtune.utils import get_logger

# sysexits.h: a temporary failure, try again; schedulers are told to queue a job again that ends so.
EXIT_REQUEUE = 75
_EXIT_CODES = {signal.SIGTERM: EXIT_REQUEUE, signal.SIGINT: 128 + signal.SIGINT}


class RunControl:
    """What asks a run to save or to stop: its settings, the clock, a file named ``SAVE``, and signals.

    Inside the block the first SIGTERM or SIGINT on any process is noticed after the step; the second ends that process
    at once. All processes learn of it by one small message a step.

    Args:
        dims: the processes.
        output_dir: a file ``SAVE`` in it is removed, and asks for a checkpoint.
        every_n_steps: of checkpoints, or None.
        every_n_minutes: since the last checkpoint, or None.
        clock: seconds, monotonic.

    Attributes:
        save_due: whether a checkpoint is to be written after this step.
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
    ) -> None:
        self._dims, self._file = dims, Path(output_dir) / "SAVE"
        self._steps, self._clock = every_n_steps, clock
        self._seconds = None if every_n_minutes is None else 60 * every_n_minutes
        self._saved_at = clock()
        self._signals = StopSignal()
        self.save_due = False
        self.exit_code = 0

    @property
    def stopping(self) -> bool:
        """Whether the run was asked to stop."""
        return self.exit_code != 0

    def after_step(self, step: int) -> None:
        """Agree with the other processes on what comes after a step.

        Args:
            step: how many were done.
        """
        found = _EXIT_CODES.get(self._signals.number, 0)
        if self._dims.is_main and not found:
            found = int(self._due(step))
        found = self._dims.max(found)
        self.save_due = found > 0
        self.exit_code = found if found > 1 else 0
        if self.save_due:
            self._saved_at = self._clock()

    def _due(self, step: int) -> bool:
        if self._file.exists():
            self._file.unlink(missing_ok=True)
            return True
        if self._steps is not None and step % self._steps == 0:
            return True
        return self._seconds is not None and self._clock() - self._saved_at >= self._seconds

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
