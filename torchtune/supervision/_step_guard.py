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
_WINDOW = 128
_MIN_LOSSES = 32


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
        >>> guard = torchtune.supervision.StepGuard(metrics, loader, dims, "run", max_skipped_steps=5)  # doctest: +SKIP
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
        self._step_metrics = step_metrics
        self._loader = loader
        self._dims = dims
        self._path = Path(output_dir) / "skipped_steps.jsonl"
        self._max_skipped_steps = max_skipped_steps
        self._spike_threshold = spike_threshold
        self._scaler = scaler
        self._recent_losses: deque[float] = deque(maxlen=_WINDOW)
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
        loss = metrics["loss"]
        grad_norm = metrics.get("grad_norm")
        if grad_norm is not None:
            grad_norm = float(grad_norm)
        reason = self._skip_reason(loss, grad_norm)
        has_overflowed = math.isfinite(loss) and grad_norm is not None and not math.isfinite(grad_norm)
        needs_smaller_scale = has_overflowed and self._scaler is not None and self._scaler.can_shrink
        if self._scaler is not None and math.isfinite(loss):
            self._scaler.update(has_overflowed=has_overflowed)
        if reason is None:
            self._in_a_row = 0
            self._recent_losses.append(loss)
            return True
        if needs_smaller_scale:
            reason = f"its gradient overflows fp16; the loss scale is {self._scaler.factor:g} from now on"
        else:
            self._in_a_row += 1
        self.num_skipped += 1
        self._record(step, reason, loss, grad_norm)
        if self._in_a_row >= self._max_skipped_steps:
            raise SkippedStepsError(
                f"max_skipped_steps: {self._in_a_row} steps in a row were skipped, the last, {step}, because {reason}: "
                f"look at their rows in {self._path}, or go on from an earlier checkpoint with a lower learning rate."
            )
        return False

    def metrics(self) -> dict[str, int]:
        """Return ``skipped_steps``, if any were skipped."""
        return {"skipped_steps": self.num_skipped} if self.num_skipped else {}

    def _skip_reason(self, loss: float, grad_norm: float | None) -> str | None:
        """Return why to skip a step, or None."""
        if not math.isfinite(loss):
            return f"its loss is {loss}"
        if grad_norm is not None and not math.isfinite(grad_norm):
            return f"the norm of its gradient is {grad_norm}"
        if self._spike_threshold is None or len(self._recent_losses) < _MIN_LOSSES:
            return None
        count = len(self._recent_losses)
        mean = math.fsum(self._recent_losses) / count
        variance = math.fsum((recent - mean) ** 2 for recent in self._recent_losses) / count
        if loss - mean > self._spike_threshold * math.sqrt(variance):
            return f"its loss {loss:.4f} is far above the mean {mean:.4f} of the steps before"
        return None

    def _record(self, step: int, reason: str, loss: float, grad_norm: float | None) -> None:
        """Log the skipped step, and write it with its rows to ``skipped_steps.jsonl``. A collective."""
        if self.num_skipped == 1:  # if the first step is skipped, the schedule moves before the optimizer
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        rows = self._rows_to_record()
        if not self._dims.is_main:
            return
        record = {
            "step": step,
            "time": time.time(),
            "reason": reason,
            "loss": loss,
            "grad_norm": grad_norm,
            "epoch": self._loader.epoch,
            "rows": rows,
        }
        append_line(self._path, json.dumps(valid_json(record), allow_nan=False))
        counts = f"{self._in_a_row} in a row, the run ends at {self._max_skipped_steps}"
        names = f"; {len(rows)} rows are named in {self._path}" if rows else ""
        get_logger().warning(f"Step {step} was skipped because {reason} ({counts}){names}.")

    def _rows_to_record(self) -> list[dict[str, Any]]:
        """Return the rows of the micro-batches whose loss is not finite; all rows of the step if it is finite in all.

        A gradient norm that is not finite cannot be attributed to a micro-batch.
        """
        is_finite = [bool(torch.isfinite(loss)) for loss in self._step_metrics.losses]
        micro_batches = set()  # (number, rank)
        for rank, is_finite_on_rank in self._dims.gather((self._loader.rank, is_finite)):
            for number, finite in enumerate(is_finite_on_rank):
                if not finite:
                    micro_batches.add((number, rank))
        return self._loader.rows(sorted(micro_batches) or None)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of skipped steps, and the losses in the mean."""
        state = {"num_skipped": self.num_skipped, "in_a_row": self._in_a_row, "losses": list(self._recent_losses)}
        if self._scaler is not None and self._scaler.state_dict():
            state["loss_scale"] = self._scaler.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        self.num_skipped = int(state["num_skipped"])
        self._in_a_row = int(state["in_a_row"])
        self._recent_losses = deque(state["losses"], maxlen=_WINDOW)
        if self._scaler is not None:
            self._scaler.load_state_dict(state.get("loss_scale", {}))
