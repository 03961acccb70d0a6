"""Skips steps that would destroy the weights."""

import json
import math
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, Batch, BatchLoader
from torchtune.modules.loss import keep_row_losses
from torchtune.modules.optim import OptimizerInBackward
from torchtune.training.parallel._parallel_dims import ParallelDims
from torchtune.training.supervise._best_validation import BestValidation
from torchtune.utils import UserError, explain_os_error, get_logger, log_once, valid_json

# Steps in the mean of the loss, and their minimum.
_WINDOW, _ENOUGH = 128, 32
# Metrics that say whether a run gets anywhere, and what a report calls them.
COURSE = {"loss": "loss", "rewards/total": "reward", "rewards/accuracies": "accuracy"}
# Name -> (sum, count).
Figures = Mapping[str, tuple[torch.Tensor | float, torch.Tensor | int]]


class Means:
    """Sums and counts by name, for means over all ranks; all ranks add the same names, with ``prefix`` before each."""

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._sums: dict[str, list[Any]] = {}

    def add(self, figures: Figures) -> None:
        """Add the sums and counts of a micro-batch, without a host sync."""
        for name, pair in figures.items():
            sums = self._sums.setdefault(self._prefix + name, [0.0, 0.0])
            sums[:] = [before + _wide(value) for before, value in zip(sums, pair, strict=True)]

    def numbers(self) -> list[Any]:
        """Sum and count of every name, for an all-reduce."""
        return [number for pair in self._sums.values() for number in pair]

    def over(self, dims: ParallelDims) -> dict[str, float]:
        """The means over all ranks; a collective."""
        return self.of(dims.exchange(self.numbers())[0])

    def of(self, sums: list[float]) -> dict[str, float]:
        """The means, from the all-reduced :meth:`numbers`; names with a count of 0 are left out."""
        pairs = zip(self._sums, sums[::2], sums[1::2], strict=True)
        return {name: total / count for name, total, count in pairs if count}

    def clear(self) -> None:
        """Remove all values."""
        self._sums = {}


def _wide(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return float(value)
    return value.detach().to(torch.float32 if value.device.type == "mps" else torch.float64)


class SkippedStepsError(UserError, RuntimeError):
    """Too many consecutive steps were skipped."""

    told_by_rank_0 = True  # all ranks find the same


class StepGuard:
    """Decides before the optimizer whether to take a step, equally on all ranks.

    A step is skipped if the loss or the gradient norm is not finite on any rank, since it would destroy the weights and
    the optimizer state, or, optionally, if the loss is a spike (a fast spike in https://arxiv.org/abs/2501.00656).
    Skipped steps and their rows of data are written to ``skipped_steps.jsonl`` in ``output_dir``. An optimizer in the
    backward pass is decided by the loss alone, before the backward pass.

    Attributes:
        exchange: the all-reduce of a step: takes numbers of this rank (the first is its loss) and whether it found a
            value that is not finite; returns the sums, and whether any rank did. :class:`RunControl` replaces it.
        best: the best validation so far.

    Args:
        optimizer: of the run.
        loader: of the training data; knows the rows of a step.
        dims: the device mesh.
        output_dir: folder of ``skipped_steps.jsonl``.
        max_skipped_steps: consecutive skipped steps that end the run.
        spike_threshold: standard deviations above the mean loss of the last 128 steps (32 at least) at which a loss is
            a spike; None disables it.
        keep_best: metric of the best validation, see :class:`BestValidation`.
        patience: validations without a better one that end the run.

    Example:
        >>> guard = torchtune.training.StepGuard(optimizer, loader, dims, "run", max_skipped_steps=5)  # doctest: +SKIP
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        loader: BatchLoader,
        dims: ParallelDims,
        output_dir: str | Path,
        max_skipped_steps: int,
        spike_threshold: float | None = None,
        keep_best: str | None = None,
        patience: int | None = None,
    ) -> None:
        self._in_backward = optimizer if isinstance(optimizer, OptimizerInBackward) else None
        self._loader, self._dims = loader, dims
        self._path = Path(output_dir) / "skipped_steps.jsonl"
        self.best = BestValidation(output_dir, keep_best, patience, writes=dims.is_main)
        self._max, self._threshold = max_skipped_steps, spike_threshold
        self._losses: list[torch.Tensor] = []
        self._agreed: tuple[float, bool] | None = None  # loss of the step, whether a value is not finite
        self._means = Means()  # of values noted in the step
        self._noted: dict[str, float] = {}
        self.exchange = self._exchange
        self._window: deque[float] = deque(maxlen=_WINDOW)
        self._in_a_row = 0
        self.num_skipped = 0
        # Of what says whether a run gets anywhere: name -> the first (step, value) since start or resume, and the last.
        self.course: dict[str, tuple[tuple[int, float], tuple[int, float]]] = {}

    def add(self, loss: torch.Tensor) -> None:
        """Add the loss of a micro-batch, a scalar, before its backward pass; the step has the sum over all ranks."""
        self._losses.append(loss.detach())
        if self._in_backward is not None:
            total = self.total_loss()
            self._in_backward.skip_step = self._agreed[1] or self._is_spike(total)

    def note(self, figures: Figures) -> None:
        """Add further values of a micro-batch; :meth:`accepts` logs their means over the step.

        Args:
            figures: name -> (sum, count); the same names on all ranks.
        """
        self._means.add(figures)

    @contextmanager
    def by_source(self, batch: Batch) -> Iterator[None]:
        """Context manager: of a batch of a mixture, the losses computed inside are noted by dataset, ``loss/<name>``.

        A loss that gives a mean alone cannot be told by dataset; that is logged once.

        Args:
            batch: on the device of the losses.
        """
        if not batch.sources:
            yield
            return
        with keep_row_losses() as kept:
            yield
        labelled = batch.labels.flatten() != CROSS_ENTROPY_IGNORE_IDX
        source = batch.per_token["source"].flatten()[labelled]
        losses = torch.cat(kept) if kept else source.new_zeros(0, dtype=torch.float32)
        if len(losses) == len(labelled):  # the loss was asked for positions without a label, too
            losses = losses[labelled]
        if len(losses) != len(source):
            log_once(get_logger(), "loss/<name> is not logged: this loss gives no losses of single tokens.")
            losses, source = losses[:0], source[:0]  # other ranks may have no label: all note the same names
        count = len(batch.sources)
        sums = _wide(losses.new_zeros(count))
        sums.index_add_(0, source, losses.to(sums.dtype))
        counts = torch.bincount(source, minlength=count)
        self.note({f"loss/{name}": (sums[i], counts[i]) for i, name in enumerate(batch.sources)})

    @contextmanager
    def validation(self) -> Iterator[Means]:
        """Context manager: values noted inside go to the returned ``Means``, with the prefix ``val_``."""
        training, self._means = self._means, Means("val_")
        try:
            yield self._means
        finally:
            self._means = training

    def total_loss(self, grad_norm: torch.Tensor | float | None = None) -> float:
        """The loss of the step, summed over micro-batches and ranks: the one all-reduce of a step.

        Args:
            grad_norm: if it is not finite, all ranks skip the step.
        """
        if self._agreed is None:
            bad = False if grad_norm is None else ~torch.isfinite(torch.as_tensor(grad_norm))
            (loss, *sums), bad = self.exchange([torch.stack(self._losses).sum(), *self._means.numbers()], bad)
            self._agreed = (loss, bad or not math.isfinite(loss))
            self._noted = self._means.of(sums)
            self._means.clear()
        return self._agreed[0]

    def _exchange(self, numbers: list[Any], bad: torch.Tensor | bool) -> tuple[list[float], bool]:
        numbers, (bad,) = self._dims.exchange(numbers, [bad])
        return numbers, bad

    def accepts(self, step: int, metrics: dict[str, Any]) -> bool:
        """Whether the optimizer may take the step.

        Args:
            step: its number, for the record.
            metrics: ``grad_norm`` is read if present; ``loss``, the means of noted values and, if above 0,
                ``skipped_steps`` are added.

        Raises:
            SkippedStepsError: ``max_skipped_steps`` consecutive steps were skipped.
        """
        grad_norm = metrics.get("grad_norm")
        loss = self.total_loss(grad_norm)
        bad, spike, reason = self._agreed[1], self._is_spike(loss), None
        self._agreed = None
        if bad or spike:
            grad_norm = None if grad_norm is None else float(grad_norm)
            reason = self._reason(loss, grad_norm, spike)
        if reason is None:
            self._in_a_row = 0
            self._window.append(loss)
        else:
            self._in_a_row += 1
            self.num_skipped += 1
            self._record(step, reason, loss, grad_norm)
        self._losses = []
        metrics |= {"loss": loss, **self._noted}
        for name in COURSE.keys() & metrics.keys():
            now = (step, metrics[name])
            self.course[name] = (self.course[name][0] if name in self.course else now, now)
        if self.num_skipped:
            metrics["skipped_steps"] = self.num_skipped
        if self._in_a_row >= self._max:
            raise SkippedStepsError(
                f"max_skipped_steps: {self._in_a_row} steps in a row were skipped, the last, {step}, because {reason}: "
                f"look at their rows in {self._path}, or go on from an earlier checkpoint with a lower learning rate."
            )
        return reason is None

    def _reason(self, loss: float, grad_norm: float | None, spike: bool) -> str:
        """Why a step is skipped."""
        if not math.isfinite(loss):
            return f"its loss is {loss}"
        if grad_norm is not None and not math.isfinite(grad_norm):
            return f"the norm of its gradient is {grad_norm}"
        if spike:
            return f"its loss {loss:.4f} is far above the mean {self._mean():.4f} of the steps before"
        return "another process found the norm of its gradient not to be finite"

    def _is_spike(self, loss: float) -> bool:
        if self._threshold is None or len(self._window) < _ENOUGH:
            return False
        mean = self._mean()
        deviation = math.sqrt(math.fsum((one - mean) ** 2 for one in self._window) / len(self._window))
        return loss - mean > self._threshold * deviation

    def _mean(self) -> float:
        return math.fsum(self._window) / len(self._window)

    def _record(self, step: int, reason: str, loss: float, grad_norm: float | None) -> None:
        if self.num_skipped == 1:  # a first step that is skipped: the schedule moves before the optimizer
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        # The micro-batches with a loss that is not finite; a gradient does not tell its micro-batch.
        mine = [bool(torch.isfinite(part)) for part in self._losses]
        finite = self._dims.gather((self._loader.rank, mine))
        culprits = {(number, rank) for rank, parts in finite for number, good in enumerate(parts) if not good}
        rows = self._loader.rows(sorted(culprits) or None)
        if not self._dims.is_main:
            return
        record = {"step": step, "time": time.time(), "reason": reason, "loss": loss, "grad_norm": grad_norm}
        record |= {"epoch": self._loader.epoch, "rows": rows}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(valid_json(record), allow_nan=False) + "\n")
        except OSError as error:
            get_logger().warning(str(explain_os_error(error, self._path)))
        where = f"; {len(rows)} rows are named in {self._path}" if rows else ""
        get_logger().warning(
            f"Step {step} was skipped because {reason} ({self._in_a_row} in a row, the run ends at {self._max}){where}."
        )

    def state_dict(self) -> dict[str, Any]:
        """Counts of skipped steps, the losses in the mean, and the best validation if one is looked for."""
        state = {"num_skipped": self.num_skipped, "in_a_row": self._in_a_row, "losses": list(self._window)}
        return state if self.best.metric is None else {**state, "best": self.best.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.num_skipped, self._in_a_row = int(state["num_skipped"]), int(state["in_a_row"])
        self._window = deque(state["losses"], maxlen=_WINDOW)
        if "best" in state:
            self.best.load_state_dict(state["best"])
