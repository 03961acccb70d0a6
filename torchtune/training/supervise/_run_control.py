"""When a run saves, and when it stops."""

import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchtune.data import BatchLoader
from torchtune.training.measure._throughput import Throughput
from torchtune.training.parallel._parallel_dims import ParallelDims
from torchtune.training.parallel._ranks import all_gather_object, any_rank, broadcast_object
from torchtune.training.supervise._best_validation import BestValidation, ValidationMetricError
from torchtune.training.supervise._signals import StopSignal
from torchtune.training.supervise._step_metrics import StepMetrics
from torchtune.utils import UserError, get_logger, log_rank_zero

# EX_TEMPFAIL of sysexits.h: schedulers can be set to requeue a job with this exit code.
EXIT_REQUEUE = 75
_EXIT_CODES = {signal.SIGINT: 128 + signal.SIGINT, signal.SIGTERM: EXIT_REQUEUE}


class DifferentDataError(UserError):
    """Ranks read different training data."""

    told_by_rank_0 = True  # all ranks find the same


class Step(NamedTuple):
    """The micro-batches of this rank, and the global counts of all ranks.

    Attributes:
        batches: micro-batches of this rank.
        num_tokens: global count of tokens.
        num_labels: global count of labelled tokens.
        num_terms: global divisor of the loss: labelled tokens unless a batch has ``terms``.
    """

    batches: list[Any]
    num_tokens: int
    num_labels: int
    num_terms: int


class RunControl:
    """Iterates over the steps of a run, and decides when it saves and stops: by settings, time, file and signals.

    Ranks agree in one all-reduce per step, :meth:`synchronize`. It carries the loss and whether all is finite, the
    wishes (time and file on rank 0, signals on any rank), and the counts of the next step, which is loaded before
    the host waits for the device. Only the first step of an epoch or after a resume has a separate all-reduce.

    Inside the block the run stops after the step in which any rank gets SIGTERM or SIGINT; a second signal ends that
    process at once.

    Args:
        dims: the device mesh.
        output_dir: a file ``SAVE`` in it asks for a checkpoint, and is removed.
        every_n_steps: interval of checkpoints; None saves after every epoch.
        every_n_minutes: maximum time since the last checkpoint, or None.
        clock: monotonic time in seconds.
        best: the best validation so far, which asks for a checkpoint, and ends the run when the patience is over.

    Attributes:
        finished: whether this is the last step of the run.
        exit_code: 75 after SIGTERM, so that schedulers requeue the job; 130 after SIGINT; 0 without a signal.

    Example:
        >>> control = torchtune.training.RunControl(torchtune.training.ParallelDims(), folder)
        >>> control.ending
        False
    """

    def __init__(
        self,
        dims: ParallelDims,
        output_dir: str | Path,
        every_n_steps: int | None = None,
        every_n_minutes: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        best: BestValidation | None = None,
    ) -> None:
        self._dims, self._file = dims, Path(output_dir) / "SAVE"
        self._steps, self._clock, self._saved_at = every_n_steps, clock, clock()
        self._seconds = None if every_n_minutes is None else 60 * every_n_minutes
        self._signals = StopSignal()
        self._throughput: Throughput | None = None
        self._loader: BatchLoader | None = None
        self._epochs = 0
        self._counts: list[int] | None = None  # tokens, labels and terms of the next step
        self._asked = self.finished = False
        self._failure: ValidationMetricError | None = None
        self.exit_code = 0
        self._best = BestValidation(output_dir) if best is None else best

    @property
    def stopping(self) -> bool:
        """Whether a signal stops the run, or its patience with validation is over, or there is nothing to compare."""
        return self.exit_code != 0 or self._best.stops or self._failure is not None

    @property
    def ending(self) -> bool:
        """Whether this is the last step, so that the checkpoint is the last one."""
        return self.stopping or self.finished

    def steps(self, loader: BatchLoader, epochs: int, throughput: Throughput | None = None) -> Iterator[Step]:
        """The steps from the loader's position to the end of the last of ``epochs``, or until the run stops.

        Args:
            loader: of the training data.
            epochs: of the run.
            throughput: measures the time of data loading.

        Raises:
            DifferentDataError: ranks read different data; they would train on rows of their own order, or wait for each
                other at the end of an epoch.
        """
        self._loader, self._epochs = loader, epochs
        self._throughput = Throughput(dims=self._dims) if throughput is None else throughput
        _check_same_data(loader.state_dict()["fingerprint"])
        while loader.epoch < epochs and not self.stopping:
            self._counts = None
            for batches in self._throughput.loading(loader):
                counts = self._dims.sum(*loader.count(batches)) if self._counts is None else self._counts
                yield Step(batches, *counts)
                if self.stopping:
                    return

    def synchronize(
        self, step: int, step_metrics: StepMetrics, grad_norm: float | torch.Tensor | None = None
    ) -> dict[str, Any]:
        """Agree on a step with all ranks, in the one all-reduce of a step; the host waits for the device here.

        Args:
            step: number of completed steps, this one included.
            step_metrics: losses and other values of this rank's micro-batches.
            grad_norm: norm of the gradients, which all ranks have computed together.

        Returns:
            The metrics of the step, the same on all ranks: ``loss``, the means of the values, and ``grad_norm``, which
            is not a number if it is not finite on any rank.
        """
        bad = False if grad_norm is None else ~torch.isfinite(torch.as_tensor(grad_norm))
        upcoming = None
        if self._loader is not None:
            with self._throughput.loading_ahead():
                upcoming = self._loader.peek_counts()
        counts = [0, 0, 0] if upcoming is None else upcoming
        flags = [bad, step_metrics.has_new_names, *self._wishes()]
        sums, (bad, new_names, *wishes) = self._dims.exchange([*counts, *step_metrics.numbers()], flags)
        if new_names:  # on any rank: in the first step, as a rule
            sums += step_metrics.new_sums(self._dims)
        self._counts = None if upcoming is None else sums[: len(counts)]
        self._obey(wishes)
        metrics = step_metrics.total(sums[len(counts) :])
        step_metrics.record(step, metrics)
        if grad_norm is not None:
            metrics["grad_norm"] = math.nan if bad and math.isfinite(grad_norm) else grad_norm
        return metrics

    def _wishes(self) -> list[bool]:
        """Whether this rank asks for a checkpoint, and for a stop by each signal."""
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

    def record_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take note of a validation: the best one so far is saved. All ranks have the same values.

        If the metric to compare is none of validation, the run saves and stops, and :meth:`finish` raises.

        Args:
            step: number of completed steps.
            metrics: of this validation.
        """
        try:
            self._asked = self._best.judge(step, metrics) or self._asked
        except ValidationMetricError as error:
            self._failure = error

    def checkpoint_due(self, step: int) -> str | None:
        """The name of the checkpoint to write now, ``epoch_<n>`` or ``step_<n>``; None if none is due.

        Args:
            step: number of completed steps.
        """
        if self._dims.world_size == 1:  # also notices what came after the message of the step
            self._obey(self._wishes())
        epoch_ends = self._loader.at_epoch_end
        self.finished = epoch_ends and self._loader.epoch == self._epochs - 1
        due = self._asked or self.stopping or (self._steps is not None and step % self._steps == 0)
        self._asked = False
        whole_epoch = epoch_ends and self._steps is None and (self.finished or self.exit_code == 0)
        if due or whole_epoch:
            self._saved_at = self._clock()
        if not (due or whole_epoch or self.finished):
            return None
        name = f"epoch_{self._loader.epoch}" if whole_epoch else f"step_{step}"
        self._best.saved_as(name)
        return name

    def finish(self, step: int, total: int) -> int:
        """Return the exit code; if the run stopped early, log how to resume it.

        Args:
            step: number of completed steps.
            total: steps of the whole run.

        Raises:
            ValidationMetricError: the metric to compare is none of validation.
        """
        if self._failure is not None:
            raise self._failure
        if step >= total:
            return 0
        if self.exit_code == 0 and self._best.stops:
            log_rank_zero(get_logger(), f"stopped early: {self._best.reason()}.")
        elif self._dims.is_main:
            get_logger().warning(
                f"Stopped after step {step} of {total}; everything is saved in {self._file.parent}: run the same "
                "command with resume_from_checkpoint=True to continue."
            )
        return self.exit_code

    def __enter__(self) -> "RunControl":
        self._signals.__enter__()
        return self

    def __exit__(self, *details: object) -> None:
        self._signals.__exit__(*details)
        if self._throughput is not None:
            self._throughput.activity.move("closing")


def _check_same_data(own: Mapping[str, Any]) -> None:
    if not any_rank(broadcast_object(own) != own):
        return
    found = all_gather_object(own)
    other = next(rank for rank, theirs in enumerate(found) if theirs != found[0])
    lengths = [found[rank]["dataset_length"] for rank in (0, other)]
    differ = "{:,} examples an epoch there, {:,} here".format(*lengths) if len({*lengths}) == 2 else "other examples"
    raise DifferentDataError(
        f"Rank {other} reads other training data than rank 0 ({differ}): give all machines the same files, or a folder "
        "that they share."
    )
