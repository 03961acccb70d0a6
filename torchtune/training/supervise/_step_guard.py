"""Steps that would spoil the weights, left out."""

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

from torchtune.data import BatchLoader
from torchtune.modules.optim import OptimizerInBackward
from torchtune.training.parallel._parallel_dims import ParallelDims
from torchtune.training.supervise._means import Figures, Means
from torchtune.utils import UserError, explain_os_error, get_logger, valid_json

# Steps that a spike is measured against, and how many of them there must be.
_WINDOW, _ENOUGH = 128, 32


class SkippedStepsError(UserError, RuntimeError):
    """So many steps in a row had to be skipped that training leads nowhere."""

    told_by_rank_0 = True  # all ranks find the same


class StepGuard:
    """Decides, before the optimizer, whether a step is taken; all processes decide alike.

    A step whose loss or gradient is not finite on any process is skipped: the weights, the states of the optimizer and
    everything behind them would be lost. So is, if asked for, a step whose loss is far above that of the steps before
    (OLMo's report calls it a fast spike, https://arxiv.org/abs/2501.00656). What was skipped is written, with the rows
    of the data, to ``skipped_steps.jsonl`` in the output folder.

    With an optimizer that steps in the backward pass, the loss alone decides, before that pass.

    Attributes:
        exchange: what agrees with the other processes: takes numbers of this process, the first its loss, and whether
            something of the step is not finite here, returns the sums over all and whether something is not finite
            anywhere. :class:`RunControl` puts its own in, which says more with the same message.

    Args:
        optimizer: of the run.
        loader: of the training data; knows which rows a step is made of.
        dims: the processes.
        output_dir: where skipped steps are written down.
        max_skipped_steps: so many in a row end the run.
        spike_threshold: standard deviations above the mean loss of the last 128 steps from which a loss is a spike;
            none is one before there were 32 steps. None takes them all.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        loader: BatchLoader,
        dims: ParallelDims,
        output_dir: str | Path,
        max_skipped_steps: int,
        spike_threshold: float | None = None,
    ) -> None:
        self._in_backward = optimizer if isinstance(optimizer, OptimizerInBackward) else None
        self._loader, self._dims = loader, dims
        self._path = Path(output_dir) / "skipped_steps.jsonl"
        self._max, self._threshold = max_skipped_steps, spike_threshold
        self._losses: list[torch.Tensor] = []
        self._agreed: tuple[float, bool] | None = None  # loss of the step, whether something of it is not finite
        self._means = Means()  # what is noted of the step besides its loss
        self._noted: dict[str, float] = {}
        self.exchange = self._exchange
        self._window: deque[float] = deque(maxlen=_WINDOW)
        self._in_a_row = 0
        self.num_skipped = 0
        self.first_loss: tuple[int, float] | None = None  # (step, loss) of this process's first step, and of its last
        self.last_loss: tuple[int, float] | None = None

    def add(self, loss: torch.Tensor) -> None:
        """Add what a micro-batch contributes to the loss of the step, before its backward pass.

        Args:
            loss: scalar; the sum over micro-batches and processes is the loss of the step.
        """
        self._losses.append(loss.detach())
        if self._in_backward is not None:
            total = self.total_loss()
            self._in_backward.skip_step = self._agreed[1] or self._is_spike(total)

    def note(self, figures: Figures) -> None:
        """Note what a micro-batch shows besides its loss; :meth:`accepts` logs the means over the step.

        Args:
            figures: name -> (sum, number of what it is a sum of); the same names on all processes.
        """
        self._means.add(figures)

    @contextmanager
    def validation(self) -> Iterator[Means]:
        """What is noted inside the block is of validation: it goes to the ``Means`` of the block, named ``val_…``."""
        training, self._means = self._means, Means("val_")
        try:
            yield self._means
        finally:
            self._means = training

    def total_loss(self, grad_norm: torch.Tensor | float | None = None) -> float:
        """The loss of the step, summed over micro-batches and processes: the one message of a step.

        Args:
            grad_norm: of this process's step; not finite, the step is skipped on all.
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
            metrics: of the step; its ``grad_norm``, if it has one, is looked at, and ``loss``, which
                :meth:`total_loss` returns, is put into it, as is what was noted, and ``skipped_steps``, once there was
                one.

        Raises:
            SkippedStepsError: this was one too many.
        """
        grad_norm = metrics.get("grad_norm")
        loss = self.total_loss(grad_norm)
        bad = self._agreed[1]
        self._agreed = None
        spike = self._is_spike(loss)
        reason = None
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
        self.first_loss, self.last_loss = self.first_loss or (step, loss), (step, loss)
        if self.num_skipped:
            metrics["skipped_steps"] = self.num_skipped
        if self._in_a_row >= self._max:
            raise SkippedStepsError(
                f"max_skipped_steps: {self._in_a_row} steps in a row were skipped, the last, {step}, because {reason}: "
                f"look at their rows in {self._path}, or go on from an earlier checkpoint with a lower learning rate."
            )
        return reason is None

    def _reason(self, loss: float, grad_norm: float | None, spike: bool) -> str:
        """Why a step is not taken."""
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
        if self.num_skipped == 1:  # a schedule that moves before the optimizer ever did; that is meant to be
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        # Of the micro-batches, those whose own loss is not finite; a gradient alone does not tell.
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
        """What was skipped, and the losses that a spike is measured against."""
        return {"num_skipped": self.num_skipped, "in_a_row": self._in_a_row, "losses": list(self._window)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` returned."""
        self.num_skipped, self._in_a_row = int(state["num_skipped"]), int(state["in_a_row"])
        self._window = deque(state["losses"], maxlen=_WINDOW)
