"""The best validation of a run: whose checkpoint is kept, and when training stops early."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtune.training.checkpointing._directories import BEST, newest_record
from torchtune.training.parallel._parallel_dims import ParallelDims
from torchtune.utils import UserError, atomic_write, get_logger

_MOST = "max:"  # before a metric of which more is better


class ValidationMetricError(UserError):
    """The metric that decides which checkpoint is best is none of validation."""

    told_by_rank_0 = True  # all ranks find the same


class BestValidation:
    """Finds the best validation by one metric, and counts the validations since then.

    The checkpoints of all bests so far are in ``best.json`` of ``output_dir``, the newest last. Pruning keeps the
    newest of them that is complete.

    Args:
        output_dir: of the run.
        metric: of validation, such as ``val_loss``; with ``max:`` before it more is better. None: ``val_loss`` if there
            is a patience, else nothing is compared.
        patience: validations without a new best after which the run ends; None never ends it.
        dims: the processes, of which the main one writes ``best.json``; None is one process.

    Attributes:
        metric: its name without ``max:``, or None.

    Example:
        >>> best = torchtune.training.BestValidation("run", "val_loss", patience=1)
        >>> best.judge(10, {"val_loss": 2.0}), best.judge(20, {"val_loss": 2.5}), best.stops
        (True, False, True)
    """

    def __init__(
        self,
        output_dir: str | Path,
        metric: str | None = None,
        patience: int | None = None,
        dims: ParallelDims | None = None,
    ) -> None:
        if metric is None and patience is not None:
            metric = "val_loss"
        self._dir, self._patience, self._writes = Path(output_dir), patience, dims is None or dims.is_main
        self._rule = metric
        self.metric = None if metric is None else metric.removeprefix(_MOST)
        self._records: list[dict[str, Any]] = []
        self._best: tuple[int, float] | None = None  # step, value
        self._waited = 0
        self._unnamed = False  # the best has no checkpoint yet

    @property
    def stops(self) -> bool:
        """Whether the patience is over."""
        return self._patience is not None and self._waited >= self._patience

    def judge(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Compare a validation with the best so far; return whether it is better. NaN and infinity never are.

        Raises:
            ValidationMetricError: the first validation has no such metric.
        """
        if self.metric is None:
            return False
        if self._best is None and self.metric not in metrics:
            raise ValidationMetricError(
                f"keep_best: validation has no {self.metric}: choose one of {', '.join(sorted(metrics))}, with "
                f"{_MOST} before it if more is better, and go on with resume_from_checkpoint=True."
            )
        value = metrics.get(self.metric, math.nan)
        sign = -1 if self._rule.startswith(_MOST) else 1
        better = math.isfinite(value) and (self._best is None or sign * value < sign * self._best[1])
        self._waited = 0 if better else self._waited + 1
        if better:
            self._best, self._unnamed = (step, value), True
        return better

    def saved_as(self, name: str) -> None:
        """Note the name of the checkpoint about to be written, if it is of a new best."""
        if not self._unnamed:
            return
        self._unnamed = False
        self._records.append({"checkpoint": name, "step": self._best[0], "value": self._best[1]})
        if not self._writes:
            return
        try:
            with atomic_write(self._dir / BEST, "w") as file:
                json.dump({"keep_best": self._rule, "best": self._records}, file, indent=1)
        except UserError as error:
            get_logger().warning(f"The best checkpoint, {name}, may be removed by a later one: {error}")

    def describe(self) -> str:
        """``"val_loss 1.2345 at step 20"``."""
        return (
            f"{self.metric} {self._best[1]:.4f} at step {self._best[0]:,}" if self._best else f"no finite {self.metric}"
        )

    def reason(self) -> str:
        """Why the run stops early."""
        count = "1 validation was" if self._waited == 1 else f"{self._waited} validations in a row were"
        return f"{count} not better than the best ({self.describe()})"

    def kept(self) -> tuple[Path, str] | None:
        """The best checkpoint that is complete, and what it has reached; None if there is none."""
        record = newest_record(self._dir, self._records)
        if record is None:
            return None
        return self._dir / record["checkpoint"], f"{self.metric} {record['value']:.4f} at step {record['step']:,}"

    def state_dict(self) -> dict[str, Any]:
        """The bests so far, and the validations since then."""
        return {"keep_best": self._rule, "records": self._records, "best": self._best, "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; a run that goes on with another metric compares anew."""
        if self.metric is None or state.get("keep_best") != self._rule:
            return
        self._records, self._waited = [dict(record) for record in state["records"]], int(state["waited"])
        self._best = None if state["best"] is None else (int(state["best"][0]), float(state["best"][1]))
