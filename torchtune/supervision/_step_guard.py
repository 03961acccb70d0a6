"""Skip steps that would destroy the weights."""

import json
import math
import time
import warnings
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torchtune.data import BatchLoader
from torchtune.supervision._step_metrics import StepMetrics
from torchtune.training import LossScaler
from torchtune.training.parallel import ParallelDims
from torchtune.utils import UserError, append_line, get_logger, valid_json

# Maximum and minimum number of steps in the mean of the loss.
_WINDOW, _MIN_LOSSES = 128, 32


class SkippedStepsError(UserError, RuntimeError):
    """Too many consecutive steps were skipped."""

    raised_on_all = True


class StepGuard:
    """Decides before the optimizer step whether to take it, equally on all ranks.

    A step is skipped if the loss or the gradient norm is not finite on any rank, since it would destroy the weights and
    the optimizer state, or, optionally, if the loss is a spike (a fast spike in https://arxiv.org/abs/2501.00656).
    Skipped steps and their rows of data are written to ``skipped_steps.jsonl`` in ``output_dir``.

    Args:
        step_metrics: losses of a step's micro-batches, to find the rows to record.
        loader: loader of the training data, which knows the rows of a step.
        dims: the device mesh.
        output_dir: folder of ``skipped_steps.jsonl``.
        max_skipped_steps: number of consecutive skipped steps that ends the run.
        spike_threshold: standard deviations above the mean loss of the last 128 steps (at least 32) from which a loss
            is a spike; None disables it.
        scaler: scale of the loss of a float16 model. Steps that only need a smaller scale are skipped without counting
            toward ``max_skipped_steps``.

    Attributes:
        num_skipped: number of skipped steps.

    Example:
        >>> guard = torchtune.training.StepGuard(metrics, loader, dims, "run", max_skipped_steps=5)  # doctest: +SKIP
    """

    def __init__(
        self,
        step_metrics: StepMetrics,
        loader: BatchLoader,
        dims: ParallelDims,
        output_dir: str | Path,
        max_skipped_steps: int,
        spike_threshold: float | None = None,
        scaler: LossScaler | None = None,
    ) -> None:
        self._step_metrics, self._loader, self._dims = step_metrics, loader, dims
        self._path = Path(output_dir) / "skipped_steps.jsonl"
        self._max, self._threshold, self._scaler = max_skipped_steps, spike_threshold, scaler
        self._window: deque[float] = deque(maxlen=_WINDOW)
        self._in_a_row = 0
        self.num_skipped = 0

    def accepts(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Return whether the optimizer may take the step.

        Args:
            step: number of the step, for the record.
            metrics: from :meth:`RunControl.synchronize`, equal on all ranks: ``loss``, and ``grad_norm`` if known.

        Raises:
            SkippedStepsError: ``max_skipped_steps`` consecutive steps were skipped.
        """
        loss, grad_norm = metrics["loss"], metrics.get("grad_norm")
        has_overflowed = math.isfinite(loss) and grad_norm is not None and not math.isfinite(float(grad_norm))
        reason = self._skip_reason(loss, grad_norm)
        needs_smaller_scale = has_overflowed and self._scaler is not None and self._scaler.can_shrink
        if self._scaler is not None and math.isfinite(loss):
            self._scaler.update(has_overflowed=has_overflowed)
        if reason is None:
            self._in_a_row = 0
            self._window.append(loss)
            return True
        if needs_smaller_scale:
            reason = f"its gradient overflows fp16; the loss scale is {self._scaler.factor:g} from now on"
        else:
            self._in_a_row += 1
        self.num_skipped += 1
        self._record(step, reason, metrics)
        if self._in_a_row >= self._max:
            raise SkippedStepsError(
                f"max_skipped_steps: {self._in_a_row} steps in a row were skipped, the last, {step}, because {reason}: "
                f"look at their rows in {self._path}, or go on from an earlier checkpoint with a lower learning rate."
            )
        return False

    def metrics(self) -> dict[str, int]:
        """Return ``skipped_steps``, if any were skipped."""
        return {"skipped_steps": self.num_skipped} if self.num_skipped else {}

    def _skip_reason(self, loss: float, grad_norm: float | torch.Tensor | None) -> str | None:
        """Return why to skip a step, or None."""
        if not math.isfinite(loss):
            return f"its loss is {loss}"
        if grad_norm is not None and not math.isfinite(grad_norm := float(grad_norm)):
            return f"the norm of its gradient is {grad_norm}"
        if self._is_spike(loss):
            return f"its loss {loss:.4f} is far above the mean {self._mean():.4f} of the steps before"
        return None

    def _is_spike(self, loss: float) -> bool:
        if self._threshold is None or len(self._window) < _MIN_LOSSES:
            return False
        mean = self._mean()
        deviation = math.sqrt(math.fsum((one - mean) ** 2 for one in self._window) / len(self._window))
        return loss - mean > self._threshold * deviation

    def _mean(self) -> float:
        return math.fsum(self._window) / len(self._window)

    def _record(self, step: int, reason: str, metrics: Mapping[str, Any]) -> None:
        if self.num_skipped == 1:  # if the first step is skipped, the schedule moves before the optimizer
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        # Micro-batches with a non-finite loss; a bad gradient norm cannot be attributed to a micro-batch.
        mine = [bool(torch.isfinite(part)) for part in self._step_metrics.losses]
        finite = self._dims.gather((self._loader.rank, mine))
        culprits = {(number, rank) for rank, parts in finite for number, good in enumerate(parts) if not good}
        rows = self._loader.rows(sorted(culprits) or None)
        if not self._dims.is_main:
            return
        grad_norm = metrics.get("grad_norm")
        record = {"step": step, "time": time.time(), "reason": reason, "loss": metrics["loss"]}
        record |= {"grad_norm": None if grad_norm is None else float(grad_norm)}
        record |= {"epoch": self._loader.epoch, "rows": rows}
        append_line(self._path, json.dumps(valid_json(record), allow_nan=False))
        where = f"; {len(rows)} rows are named in {self._path}" if rows else ""
        get_logger().warning(
            f"Step {step} was skipped because {reason} ({self._in_a_row} in a row, the run ends at {self._max}){where}."
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of skipped steps, and the losses in the mean."""
        state = {"num_skipped": self.num_skipped, "in_a_row": self._in_a_row, "losses": list(self._window)}
        scale = {} if self._scaler is None else self._scaler.state_dict()
        return {**state, "loss_scale": scale} if scale else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        self.num_skipped, self._in_a_row = int(state["num_skipped"]), int(state["in_a_row"])
        self._window = deque(state["losses"], maxlen=_WINDOW)
        if self._scaler is not None:
            self._scaler.load_state_dict(state.get("loss_scale", {}))
