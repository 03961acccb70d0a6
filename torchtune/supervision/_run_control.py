"""Decide when a run saves and stops."""

import logging
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from torchtune.checkpoints import MARKER
from torchtune.data import BatchLoader
from torchtune.supervision._best_validation import BestValidation, ValidationMetricError
from torchtune.supervision._signals import StopSignal
from torchtune.supervision._step_metrics import StepMetrics, means_of
from torchtune.supervision._throughput import Throughput
from torchtune.training import LateMetrics
from torchtune.training.parallel import LateExchange, ParallelDims, all_gather_object, any_rank, broadcast_object
from torchtune.utils import EXIT_REQUEUE, GRACE_VARIABLE, UserError, get_logger, log_rank_zero

# Where a checkpoint takes longer than the grace period, the time between two is this many times its duration.
_DURATIONS_BETWEEN = 10
_EXIT_CODES = {signal.SIGINT: 128 + signal.SIGINT, signal.SIGTERM: EXIT_REQUEUE}


class DifferentDataError(UserError):
    """Ranks read different training data."""

    raised_on_all = True


class Step(NamedTuple):
    """The micro-batches of this rank, and the global counts of all ranks.

    Attributes:
        batches: micro-batches of this rank.
        num_tokens: global count of tokens.
        num_labels: global count of labeled tokens.
        num_terms: global divisor of the loss: labeled tokens or the sum of their weights, unless a batch has ``terms``.
    """

    batches: list[Any]
    num_tokens: int
    num_labels: int
    num_terms: float


class RunControl:
    """Iterates over the steps of a run, and decides when it saves and stops: by settings, time, file and signals.

    Ranks agree in one all-reduce per step, :meth:`synchronize`. It carries the loss and whether all values are finite,
    the requests (time and file on rank 0, signals on any rank), and the counts of the next step, which is loaded before
    the ranks wait for each other. Only the first step of an epoch or after a resume has a separate all-reduce.

    On CUDA, the loss and all values of the device have an all-reduce of their own, and arrive while the host goes on:
    :meth:`synchronize` receives those of the step before. A validation, a checkpoint and the end of the run wait for
    them.

    Inside the block, SIGTERM or SIGINT on any rank stops the run after the step; a second signal ends that process at
    once. If a checkpoint takes longer than the grace period between the signal and the kill (``tune run --grace``), the
    one after the signal would not be complete: a warning says so, and checkpoints are written more often.

    Args:
        dims: the device mesh.
        output_dir: folder of the run; a file ``SAVE`` in it requests a checkpoint and is then removed.
        every_n_steps: interval of checkpoints: a number of steps, a fraction of ``total_steps``, or ``"epoch"``; None
            saves after every epoch.
        every_n_minutes: maximum time since the last checkpoint, or None.
        clock: monotonic time in seconds.
        best: tracks the best validation; requests a checkpoint for each new best, and stops the run when the patience
            is exhausted.
        total_steps: number of steps of the run, whatever the epochs; None for all steps of the epochs.
        validate_every: interval of validations, as ``every_n_steps``; None for no validation.

    Attributes:
        finished: whether this is the last step of the run.
        exit_code: 75 after SIGTERM, so that schedulers requeue the job; 130 after SIGINT; 0 without a signal.

    Example:
        >>> control = torchtune.supervision.RunControl(torchtune.training.ParallelDims(), folder)
        >>> control.ending
        False
    """

    def __init__(
        self,
        dims: ParallelDims,
        output_dir: str | Path,
        every_n_steps: float | Literal["epoch"] | None = None,
        every_n_minutes: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        best: BestValidation | None = None,
        total_steps: int | None = None,
        validate_every: float | Literal["epoch"] | None = None,
    ) -> None:
        self._dims = dims
        self._save_file = Path(output_dir) / "SAVE"
        self._save_every = every_n_steps
        if every_n_steps is None:
            self._save_every = "epoch"
        self._validate_every = validate_every
        self._total_steps = total_steps
        self._every_n_seconds = every_n_minutes
        if every_n_minutes is not None:
            self._every_n_seconds = 60 * every_n_minutes
        self._clock = clock
        self._saved_at = clock()  # the first interval begins with the run
        self._grace = float(os.environ.get(GRACE_VARIABLE, "inf"))  # seconds; infinite: checkpoints are not measured
        self._unmeasured: Path | None = None  # a checkpoint that is being written, perhaps in the background
        self._signals = StopSignal()
        self._throughput: Throughput | None = None
        self._loader: BatchLoader | None = None
        self._epochs = 0
        self._counts: list[int] | None = None  # tokens, labels and terms of the next step
        self._should_save = False
        self._exchange: LateExchange | None = None  # of the last step, if its metrics are not settled
        self._late_metrics: LateMetrics | None = None  # of the last step
        self.finished = False
        self._failure: ValidationMetricError | None = None
        self.exit_code = 0
        if best is None:
            best = BestValidation(output_dir)  # of no metric: nothing is compared
        self._best = best

    @property
    def stopping(self) -> bool:
        """Whether a signal, the patience of validation or a missing metric stops the run."""
        return self.exit_code != 0 or self._best.should_stop or self._failure is not None

    @property
    def ending(self) -> bool:
        """Whether this is the last step, so that its checkpoint is the last one."""
        return self.stopping or self.finished

    def steps(self, loader: BatchLoader, epochs: int, throughput: Throughput | None = None) -> Iterator[Step]:
        """Yield the steps from the loader's position to the end of the run, or until the run stops.

        Args:
            loader: loader of the training data.
            epochs: number of epochs of the run; with ``total_steps``, it ends after these.
            throughput: measures the time of data loading.

        Raises:
            DifferentDataError: ranks read different data, which would mix up rows, or deadlock at the end of an epoch.
        """
        self._loader = loader
        self._epochs = epochs
        if throughput is None:
            throughput = Throughput(dims=self._dims)
        self._throughput = throughput
        if self._total_steps is not None:  # a resumed run may be at its end
            self.finished = self._throughput.activity.step >= self._total_steps
        _check_same_data(loader.state_dict()["fingerprint"])
        while not self.stopping:
            if self._total_steps is None:
                has_ended = loader.epoch >= self._epochs
            else:  # as many epochs as the steps take
                has_ended = self.finished
            if has_ended:
                return
            self._counts = None
            for batches in self._throughput.loading(loader):
                counts = self._counts
                if counts is None:  # synchronize has not counted ahead, as in the first step
                    counts = self._dims.sum(*loader.count(batches))
                yield Step(batches, *counts)
                is_cut = self.finished and not loader.at_epoch_end  # else the loader goes on to the next epoch
                if self.stopping or is_cut:
                    return

    def synchronize(
        self, step: int, step_metrics: StepMetrics, grad_norm: float | torch.Tensor | None = None
    ) -> MutableMapping[str, Any]:
        """Agree on a step with all ranks; the host waits for the device here, but on CUDA only for the step before.

        Args:
            step: number of completed steps, including this one.
            step_metrics: losses and other values of this rank's micro-batches.
            grad_norm: norm of the gradients over all ranks.

        Returns:
            The metrics of the step, equal on all ranks: ``loss``, the means of the values, and ``grad_norm``, which is
            NaN if it is not finite on any rank. On CUDA they are :class:`~torchtune.training.LateMetrics`.

        Raises:
            SkippedStepsError: the step before was one too many that was skipped.
        """
        self._settle()
        # What this rank sends: counts of its next step, values that are added up, and flags of any rank.
        norm_is_bad = False
        norm_of_main = 0.0
        if grad_norm is not None:
            norm_is_bad = ~torch.isfinite(torch.as_tensor(grad_norm))
            # All ranks have the same norm: the sum over ranks is that of the main one. It is in the message so that the
            # host does not wait for it a second time.
            if self._dims.is_main:
                norm_of_main = grad_norm
        next_counts = None
        if self._loader is not None:
            with self._throughput.loading_ahead():
                next_counts = self._loader.peek_counts()
        # All ranks send equally many numbers, also those whose loader is at its end.
        counts = next_counts
        if counts is None:
            counts = [0, 0, 0.0]  # tokens, labels, terms
        # The norm, the loss, and then pairs of a sum and a count: `read` and `exchange.message` rely on this order.
        values = [norm_of_main, *step_metrics.sums_and_counts()]
        requests = [step_metrics.has_new_names, *self._local_requests()]

        # One message of numbers and flags; where the values are on the device, they travel by themselves.
        exchange: LateExchange | None = None
        if self._dims.sends_from_device(values):
            # First, so that the device begins before the hosts wait for each other.
            exchange = self._dims.start_exchange(values, [norm_is_bad])
            counts, requests = self._dims.exchange(counts, requests, on_host=True)
        else:
            sums, flags = self._dims.exchange([*counts, *values], [norm_is_bad, *requests])
            counts = sums[:3]
            values = sums[3:]
            norm_is_bad, *requests = flags  # on any rank
        # What all ranks have sent.
        has_new_names, *requests = requests
        new_sums = []
        if has_new_names:  # usually in the first step
            new_sums = step_metrics.new_sums(self._dims)
        self._counts = None
        if next_counts is not None:
            self._counts = counts
        self._apply_requests(requests)
        names = step_metrics.end_step()

        def read(values: list[float], norm_is_bad: bool) -> dict[str, Any]:
            """Return the metrics from the sums over all ranks."""
            norm, loss, *sums = values
            metrics = {"loss": loss, **means_of(names, sums + new_sums)}
            step_metrics.record(step, metrics)
            if grad_norm is not None and norm_is_bad and math.isfinite(norm):  # another rank sent the flag for its own
                metrics["grad_norm"] = math.nan
            elif grad_norm is not None:
                metrics["grad_norm"] = norm
            return metrics

        if exchange is None:
            return read(values, norm_is_bad)

        def receive() -> dict[str, Any]:
            """Wait for the sums, and return the metrics."""
            values, (norm_is_bad,) = exchange.wait()
            return read(values, norm_is_bad)

        # The message on the device: the optimizer learns there, without the host, whether to leave out the step.
        loss_is_finite = torch.isfinite(exchange.message[1])
        norm_is_bad = exchange.message[-1]
        self._exchange = exchange
        self._late_metrics = LateMetrics(receive, ~loss_is_finite | (norm_is_bad > 0), loss_is_finite)
        return self._late_metrics

    def _settle(self) -> None:
        """Receive the metrics of the last step, and do what waits for them. A collective."""
        if self._late_metrics is not None:
            late_metrics = self._late_metrics
            self._exchange = None
            self._late_metrics = None
            late_metrics.settle()

    def _settle_after_error(self) -> None:
        """Log the step before the one that failed, unless this takes a device that may hang, or other ranks."""
        try:
            if self._exchange is None or not self._exchange.has_arrived:
                return
        except RuntimeError:  # the device has failed
            return
        values = [self._late_metrics["loss"], self._late_metrics.get("grad_norm", 0.0)]
        if self._dims.world_size == 1 or all(map(math.isfinite, values)):  # ranks record a skipped step together
            self._settle()

    def _local_requests(self) -> list[bool]:
        """Return whether this rank requests a checkpoint, and whether it received each signal."""
        self._check_grace()
        is_save_requested = False
        if self._dims.is_main:  # clocks differ, and the file is removed once
            if self._every_n_seconds is not None:
                is_save_requested = self._clock() - self._saved_at >= self._every_n_seconds
            if self._save_file.exists():
                self._save_file.unlink(missing_ok=True)
                is_save_requested = True
        signals = [self._signals.number == number for number in _EXIT_CODES]
        return [is_save_requested, *signals]

    def _check_grace(self) -> None:
        """Measure a checkpoint when it is complete; the first that outlasts the grace period shortens the interval.

        The step that has followed is included, because after a signal a step is finished, too.
        """
        if self._unmeasured is None or not (self._unmeasured / MARKER).exists():
            return
        self._unmeasured = None
        seconds = self._clock() - self._saved_at
        if seconds <= self._grace:
            return
        longest_interval = _DURATIONS_BETWEEN * seconds
        if self._every_n_seconds is None or self._every_n_seconds > longest_interval:
            self._every_n_seconds = longest_interval
            consequence = f"one is written every {longest_interval / 60:.3g} minutes"
        else:
            consequence = f"save_every_n_minutes writes one every {self._every_n_seconds / 60:.3g} minutes"
        get_logger().warning(
            f"A checkpoint and a step take {seconds:.3g} s, more than the {self._grace:.3g} s between the signal and "
            f"the kill (--grace): a checkpoint that begins at the signal is lost, so {consequence}."
        )
        self._grace = math.inf  # warned once: nothing is measured from here on

    def _apply_requests(self, requests: list[bool]) -> None:
        """Apply the requests of all ranks, see :meth:`_local_requests`; the first signal decides the exit code."""
        is_save_requested, *signals = requests
        self._should_save = self._should_save or is_save_requested
        self.exit_code = 0
        for code, was_received in zip(_EXIT_CODES.values(), signals, strict=True):
            if was_received:
                self.exit_code = code
                break

    def record_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a validation; a new best requests a checkpoint. All ranks have the same values.

        If validation lacks the metric, the run saves and stops, and :meth:`finish` raises.

        Args:
            step: number of completed steps.
            metrics: metrics of this validation.
        """
        try:
            self._should_save = self._best.update(step, metrics) or self._should_save
        except ValidationMetricError as error:
            self._failure = error

    def validation_due(self, step: int) -> bool:
        """Return whether the model is to be validated now.

        Args:
            step: number of completed steps.
        """
        if self._validate_every is None or not self._is_nth_step(step, self._validate_every):
            return False
        self._settle()
        return True

    def _is_nth_step(self, step: int, every: float | Literal["epoch"]) -> bool:
        """Return whether an interval of steps ends with this step.

        An interval that is a fraction f of the run ends with the first step after f, 2f, 3f … of the run.
        """
        if every == "epoch":
            return self._loader.at_epoch_end or step == self._total_steps
        if isinstance(every, int):
            return step % every == 0
        intervals_per_step = 1 / (every * self._total_steps)
        # Rounded, as 3 · (1 / 3) may be below 1.
        num_ended = math.floor(step * intervals_per_step + 1e-9)
        num_ended_before = math.floor((step - 1) * intervals_per_step + 1e-9)
        return num_ended > num_ended_before

    def checkpoint_due(self, step: int) -> str | None:
        """Return the name of the checkpoint to write now, ``epoch_<n>`` or ``step_<n>``; None if none is due.

        Args:
            step: number of completed steps.
        """
        # Catches requests after synchronize(), too. Several ranks must agree, and do so in the next step.
        if self._dims.world_size == 1:
            self._apply_requests(self._local_requests())
        epoch_ends = self._loader.at_epoch_end
        if self._total_steps is None:
            self.finished = epoch_ends and self._loader.epoch == self._epochs - 1
        else:
            self.finished = step >= self._total_steps
        saves_epochs = self._save_every == "epoch"
        is_nth_step = not saves_epochs and self._is_nth_step(step, self._save_every)
        is_due = self._should_save or self.stopping or is_nth_step
        self._should_save = False  # a request is met once
        # After a signal, the checkpoint is that of a step, from which the run goes on.
        is_epoch_checkpoint = epoch_ends and saves_epochs and (self.finished or self.exit_code == 0)
        if is_due or is_epoch_checkpoint:
            self._saved_at = self._clock()  # from here, the next interval is measured
        if not (is_due or is_epoch_checkpoint or self.finished):
            return None
        self._settle()  # so that the state of the checkpoint is decided
        if is_epoch_checkpoint:
            name = f"epoch_{self._loader.epoch}"
        else:
            name = f"step_{step}"
        self._best.record_checkpoint(name)
        if self._dims.is_main and math.isfinite(self._grace):
            self._saved_at = self._clock()  # without the wait above: from here, `_check_grace` measures the checkpoint
            self._unmeasured = self._save_file.parent / name
        return name

    def finish(self, step: int, total: int) -> int:
        """Return the exit code; if the run stopped early, log how to resume it.

        Args:
            step: number of completed steps.
            total: number of steps of the run.

        Raises:
            ValidationMetricError: validation lacks the metric.
        """
        self._settle()
        if self._failure is not None:
            raise self._failure
        if step >= total and self._best.is_missing:
            log_rank_zero(
                get_logger(),
                f"keep_best: the run never measured {self._best.metric}, so no checkpoint is the best: pass it to "
                "record_validation in train.",
                logging.WARNING,
            )
        if step >= total:  # finished, so that nothing is to be requeued, even after a signal
            return 0
        if self.exit_code == 0 and self._best.should_stop:
            log_rank_zero(get_logger(), f"stopped early: {self._best.stop_reason()}.")
        elif self._dims.is_main:
            get_logger().warning(
                f"Stopped after step {step} of {total}; everything is saved in {self._save_file.parent}: run the same "
                "command with resume_from_checkpoint=True to continue."
            )
        return self.exit_code

    def __enter__(self) -> "RunControl":
        self._signals.__enter__()
        return self

    def __exit__(self, *details: object) -> None:
        if self._late_metrics is not None:
            self._settle_after_error()
        self._signals.__exit__(*details)
        if self._throughput is not None:
            self._throughput.activity.move("closing")


def describe_interval(every: float | Literal["epoch"] | None) -> str:
    """Return an interval of checkpoints as text, such as ``"50 steps"``.

    Example:
        >>> torchtune.supervision.describe_interval(0.25)
        '0.25 of the run'
    """
    if every is None or every == "epoch":
        return "epoch"
    if isinstance(every, int):
        return f"{every} steps"
    return f"{every:.4g} of the run"


def _check_same_data(fingerprint: Mapping[str, Any]) -> None:
    """Check that the loaders of all ranks have the fingerprint of rank 0's. A collective."""
    if not any_rank(broadcast_object(fingerprint) != fingerprint):
        return
    fingerprints = all_gather_object(fingerprint)
    for rank, fingerprint in enumerate(fingerprints):
        if fingerprint == fingerprints[0]:
            continue
        length_of_first = fingerprints[0]["dataset_length"]
        length = fingerprint["dataset_length"]
        difference = "other examples"
        if length != length_of_first:
            difference = f"{length_of_first:,} examples an epoch there, {length:,} here"
        raise DifferentDataError(
            f"Rank {rank} reads other training data than rank 0 ({difference}): give all machines the same files, or a "
            "folder that they share."
        )
