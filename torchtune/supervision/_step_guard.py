"""Skip steps that would destroy the weights."""

import json
import math
import time
import warnings
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchtune.data import BatchLoader
from torchtune.supervision._step_metrics import StepMetrics
from torchtune.training import DeviceSkips, LateMetrics, LossScaler
from torchtune.training.parallel import ParallelDims
from torchtune.utils import UserError, append_line, get_logger, valid_json

# Maximum and minimum number of steps in the mean of the loss.
_WINDOW = 128
_MIN_LOSSES = 32


class SkippedStepsError(UserError, RuntimeError):
    """Too many consecutive steps were skipped."""

    raised_on_all = True


@dataclass
class _StepData:
    """What the record of a skipped step needs.

    Attributes:
        step: number of the step.
        epoch: number of its epoch.
        losses: losses of its micro-batches on this rank.
        indices: indices of its examples, for all ranks; None if it is the loader's last step.
    """

    step: int
    epoch: int
    losses: list[torch.Tensor]
    indices: np.ndarray | None = None


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
        skips: lets the optimizer leave out steps on a CUDA device, so that the host does not wait to decide. The host
            decides, and waits, where it must know more than whether a step is finite: with ``spike_threshold``.

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
        skips: DeviceSkips | None = None,
    ) -> None:
        self._step_metrics = step_metrics
        self._loader = loader
        self._dims = dims
        self._path = Path(output_dir) / "skipped_steps.jsonl"
        self._max_skipped_steps = max_skipped_steps
        self._spike_threshold = spike_threshold
        self._scaler = scaler
        self._skips = skips
        self._undecided: LateMetrics | None = None  # of the last step, if the host does not know its outcome
        self._recent_losses: deque[float] = deque(maxlen=_WINDOW)
        self._in_a_row = 0
        self.num_skipped = 0

    def accepts(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Return whether to call the optimizer.

        If the optimizer can leave out the step by itself (``skips``), the answer is True, and the step is decided and
        recorded when its metrics are settled.

        Args:
            step: number of the step, for the record.
            metrics: from :meth:`RunControl.synchronize`, equal on all ranks: ``loss``, and ``grad_norm`` if known.

        Raises:
            SkippedStepsError: ``max_skipped_steps`` consecutive steps were skipped.
        """
        self._settle()
        step_data = _StepData(step, self._loader.epoch, self._step_metrics.losses)
        if not isinstance(metrics, LateMetrics):
            return self._decide(metrics, step_data)
        if not self._optimizer_decides:
            accepted = self._decide(metrics, step_data)  # reads the loss, for which the host waits
            metrics.settle()  # the numbers are there, so that loggers need not wait for the next step
            return accepted
        self._skips.prepare(metrics.is_bad)
        if self._scaler is not None:
            self._scaler.update_on_device(is_bad=metrics.is_bad, loss_is_finite=metrics.loss_is_finite)
        step_data.indices = self._loader.step_indices  # the loader will have gone on when the step is decided
        self._undecided = metrics

        def decide_late() -> None:
            """Learn what the optimizer did with the step."""
            self._undecided = None
            was_bad = self._skip_reason(metrics["loss"], metrics["grad_norm"]) is not None
            self._skips.finish(was_bad=was_bad)  # undoes the step counts of a step that the optimizer left out
            self._decide(metrics, step_data, was_decided_by_device=True)
            metrics.update(self.metrics())  # readers that follow, such as loggers, see the skipped step

        metrics.when_settled(decide_late)
        return True

    @property
    def _optimizer_decides(self) -> bool:
        """Whether a step is skipped only if it is not finite, and the optimizer can do this by itself."""
        if self._skips is None or self._spike_threshold is not None:
            return False
        return self._skips.is_supported

    def _settle(self) -> None:
        """Decide on the last step, if it is not decided. A collective."""
        if self._undecided is not None:
            self._undecided.settle()

    def _decide(
        self, metrics: Mapping[str, Any], step_data: "_StepData", *, was_decided_by_device: bool = False
    ) -> bool:
        """Return whether a step is accepted, and record a skipped one. A collective."""
        step = step_data.step
        loss = metrics["loss"]
        grad_norm = metrics.get("grad_norm")
        if grad_norm is not None:
            grad_norm = float(grad_norm)
        reason = self._skip_reason(loss, grad_norm)
        # A finite loss whose gradient is not: of a scaled loss, the scale is too large.
        has_overflowed = math.isfinite(loss) and grad_norm is not None and not math.isfinite(grad_norm)
        needs_smaller_scale = has_overflowed and self._scaler is not None and self._scaler.can_shrink
        if self._scaler is not None and math.isfinite(loss):
            self._scaler.update(has_overflowed=has_overflowed, was_decided_by_device=was_decided_by_device)
        if reason is None:
            self._in_a_row = 0
            self._recent_losses.append(loss)  # of accepted steps only, so that spikes do not raise the mean
            return True
        if needs_smaller_scale:  # usual in the first steps, and no sign of a broken run
            reason = f"its gradient overflows fp16; the loss scale is {self._scaler.decided_factor:g} from now on"
        else:
            self._in_a_row += 1
        self.num_skipped += 1
        self._record(step_data, reason, loss, grad_norm)
        if self._in_a_row >= self._max_skipped_steps:
            raise SkippedStepsError(
                f"max_skipped_steps: {self._in_a_row} steps in a row were skipped, the last, {step}, because {reason}: "
                f"look at their rows in {self._path}, or go on from an earlier checkpoint with a lower learning rate."
            )
        return False

    def metrics(self) -> dict[str, int]:
        """Return ``skipped_steps``, if any were skipped; metrics of a step that is decided later get it then."""
        is_known = self._undecided is None
        if self.num_skipped and is_known:
            return {"skipped_steps": self.num_skipped}
        return {}

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

    def _record(self, step_data: "_StepData", reason: str, loss: float, grad_norm: float | None) -> None:
        """Log the skipped step, and write it with its rows to ``skipped_steps.jsonl``. A collective."""
        if self.num_skipped == 1:  # if the first step is skipped, the schedule moves before the optimizer
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        rows = self._rows_to_record(step_data)  # a collective, so before the other ranks return
        if not self._dims.is_main:
            return
        record = {
            "step": step_data.step,
            "time": time.time(),
            "reason": reason,
            "loss": loss,
            "grad_norm": grad_norm,
            "epoch": step_data.epoch,
            "rows": rows,
        }
        append_line(self._path, json.dumps(valid_json(record), allow_nan=False))
        counts = f"{self._in_a_row} in a row, the run ends at {self._max_skipped_steps}"
        text = f"Step {step_data.step} was skipped because {reason} ({counts})"
        if rows:
            text += f"; {len(rows)} rows are named in {self._path}"
        get_logger().warning(f"{text}.")

    def _rows_to_record(self, step_data: "_StepData") -> list[dict[str, Any]]:
        """Return the rows of the micro-batches whose loss is not finite; all rows of the step if it is finite in all.

        A gradient norm that is not finite cannot be attributed to a micro-batch.
        """
        is_finite = [bool(torch.isfinite(loss)) for loss in step_data.losses]
        micro_batches = set()  # (number, rank)
        for rank, is_finite_on_rank in self._dims.gather((self._loader.rank, is_finite)):
            for number, finite in enumerate(is_finite_on_rank):
                if not finite:
                    micro_batches.add((number, rank))
        if not micro_batches:
            return self._loader.rows(None, step_data.indices)
        return self._loader.rows(sorted(micro_batches), step_data.indices)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of skipped steps, and the losses in the mean. A collective."""
        self._settle()
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
