"""The best validation of a run: selects the checkpoint to keep, and stops training early."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtune.checkpoints import BEST, newest_record
from torchtune.config import RecipeSettingsError, SettingsView, nearest
from torchtune.training.parallel import ParallelDims
from torchtune.utils import UserError, atomic_write, get_logger

_MAXIMIZE_PREFIX = "max:"  # prefix of a metric to maximize


class ValidationMetricError(UserError):
    """The metric for the best checkpoint is not a validation metric."""

    raised_on_all = True


class BestValidation:
    """Tracks the best validation by one metric, and counts the validations since.

    ``best.json`` in ``output_dir`` lists the checkpoints of all best validations so far, the newest last. Pruning keeps
    the newest complete one.

    Args:
        output_dir: folder of the run.
        metric: validation metric, such as ``val_loss``, or any name without ``val_`` that a copied recipe passes to
            :meth:`update`; with the prefix ``max:``, higher is better. None means ``val_loss`` if ``patience`` is set;
            otherwise nothing is compared.
        patience: number of validations without improvement after which the run ends; None never ends it.
        dims: processes of the run; the main process writes ``best.json``. None means a single process.

    Attributes:
        metric: the metric without ``max:``, or None.

    Example:
        >>> best = torchtune.supervision.BestValidation("run", "val_loss", patience=1)
        >>> best.update(10, {"val_loss": 2.0}), best.update(20, {"val_loss": 2.5}), best.should_stop
        (True, False, True)
    """

    @staticmethod
    def is_own_metric(keep_best: str) -> bool:
        """Return whether ``keep_best`` names a metric of a copied recipe, not one of its validation."""
        return not keep_best.removeprefix(_MAXIMIZE_PREFIX).startswith("val_")

    def __init__(
        self,
        output_dir: str | Path,
        metric: str | None = None,
        patience: int | None = None,
        dims: ParallelDims | None = None,
    ) -> None:
        if metric is None and patience is not None:
            metric = "val_loss"
        self._dir = Path(output_dir)
        self._patience = patience
        self._is_writer = dims is None or dims.is_main
        self._metric_setting = metric
        self.metric = metric
        if metric is not None:
            self.metric = metric.removeprefix(_MAXIMIZE_PREFIX)
        self._records: list[dict[str, Any]] = []
        self._best: tuple[int, float] | None = None  # step, value
        self._num_worse = 0
        self._has_metric = False
        self._needs_checkpoint = False  # the best has no checkpoint yet

    @property
    def is_missing(self) -> bool:
        """Whether there is a metric, and no call of :meth:`update` had it."""
        return self.metric is not None and not self._has_metric

    @property
    def should_stop(self) -> bool:
        """Whether the patience is exhausted."""
        return self._patience is not None and self._num_worse >= self._patience

    def update(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Compare a validation with the best so far; return whether it is better; NaN and infinity never are.

        NaN of a metric other than ``val_loss`` means that it could not be measured: the validation does not count.

        Raises:
            ValidationMetricError: the first validation lacks the metric, and its name is that of a validation metric.
        """
        if self.metric is None:
            return False
        if self.metric not in metrics and self.is_own_metric(self.metric):
            return False  # the recipe validates and measures at different steps
        self._has_metric = self._has_metric or self.metric in metrics
        # Later validations may lack it: they count as not better, and do not end a run that has a best.
        if self._best is None and self.metric not in metrics:
            suggestion = ""
            similar_name = nearest(self.metric, metrics)
            if similar_name:
                suggestion = f" (did you mean {similar_name}?)"
            raise ValidationMetricError(
                f"keep_best: validation has no {self.metric}{suggestion}: choose one of {', '.join(sorted(metrics))}, "
                f"with {_MAXIMIZE_PREFIX} before it if more is better, and go on with resume_from_checkpoint=True."
            )
        value = metrics.get(self.metric, math.nan)
        if math.isnan(value) and self.metric in metrics and self.metric != "val_loss":
            return False  # it could not be measured; but a loss of NaN is of a diverged model, and counts as worse
        is_better = math.isfinite(value)  # the first finite value is the best
        if is_better and self._best is not None:
            _, best_value = self._best
            if self._metric_setting.startswith(_MAXIMIZE_PREFIX):
                is_better = value > best_value
            else:
                is_better = value < best_value
        if not is_better:
            self._num_worse += 1
            return False
        self._num_worse = 0
        self._best = (step, value)
        self._needs_checkpoint = True  # until `record_checkpoint` names it
        return True

    def record_checkpoint(self, name: str) -> None:
        """Record the name of the checkpoint about to be written, if it is for a new best."""
        if not self._needs_checkpoint:
            return
        self._needs_checkpoint = False
        step, value = self._best
        self._records.append({"checkpoint": name, "step": step, "value": value})
        if not self._is_writer:
            return
        try:
            with atomic_write(self._dir / BEST, "w") as file:
                json.dump({"keep_best": self._metric_setting, "best": self._records}, file, indent=1)
        except UserError as error:
            get_logger().warning(f"The best checkpoint, {name}, may be removed by a later one: {error}")

    def describe(self) -> str:
        """Return text such as ``"val_loss 1.2345 at step 20"``."""
        if self._best is None:
            return f"no finite {self.metric}"
        step, value = self._best
        return f"{self.metric} {value:.4f} at step {step:,}"

    def stop_reason(self) -> str:
        """Return the reason why the run stops early."""
        if self._num_worse == 1:
            count = "1 validation was"
        else:
            count = f"{self._num_worse} validations in a row were"
        return f"{count} not better than the best ({self.describe()})"

    def best_checkpoint(self) -> tuple[Path, str] | None:
        """Return the best complete checkpoint and a text with its value; None if there is none."""
        record = newest_record(self._dir, self._records)
        if record is None:
            return None
        return self._dir / record["checkpoint"], f"{self.metric} {record['value']:.4f} at step {record['step']:,}"

    def state_dict(self) -> dict[str, Any]:
        """Return the best validations so far, and the number of validations since."""
        return {
            "keep_best": self._metric_setting,
            "records": self._records,
            "best": self._best,
            "waited": self._num_worse,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`; a run that resumes with another metric compares anew."""
        if self.metric is None or state.get("keep_best") != self._metric_setting:
            return
        self._records = [dict(record) for record in state["records"]]
        self._num_worse = int(state["waited"])
        self._best = None
        if state["best"] is not None:
            step, value = state["best"]
            self._best = (int(step), float(value))


def explain_no_validation(settings: Any, steps: int) -> str | None:
    """Return why a run of this many steps never uses its validation data; None if it does, or has none.

    Raises:
        RecipeSettingsError: ``keep_best`` or ``early_stopping_patience`` needs a validation.

    Example:
        >>> settings = {"dataset_val": {"_component_": "torchtune.datasets.chat_dataset"}}
        >>> torchtune.supervision.explain_no_validation(settings, steps=10)
        'it is never measured: run_val_every_n_steps is not set'
    """
    cfg = SettingsView.of(settings)
    every = cfg.run_val_every_n_steps
    if cfg.dataset_val is None:
        return None
    if every is not None and (not isinstance(every, int) or every <= steps):  # a fraction and epochs are always due
        return None
    if every is None:
        return "it is never measured: run_val_every_n_steps is not set"
    reason = f"run_val_every_n_steps is {every:,} and the run has {steps:,} steps: set it to at most that"
    if cfg.keep_best is not None and BestValidation.is_own_metric(cfg.keep_best):
        return f"it is never measured: {reason}"
    for name in ("keep_best", "early_stopping_patience"):
        if getattr(cfg, name) is not None:
            raise RecipeSettingsError(f"{name}: there would be no validation to compare, {reason}.")
    return f"it is never measured: {reason}"
