"""The steps of a run: rows of a batch, length of an epoch, length of the run."""

import math
from dataclasses import dataclass
from typing import Any

from torchtune.config import SettingsView
from torchtune.data import BatchLoader


@dataclass(frozen=True)
class StepPlan:
    """Rows of an optimizer step, and the length of a run.

    Attributes:
        batch_size: rows per micro-batch and data-parallel rank.
        gradient_accumulation_steps: micro-batches per optimizer step.
        epochs: passes over the training data.
        max_steps_per_epoch: maximum number of optimizer steps per epoch; None for the whole epoch.
        max_steps: number of optimizer steps of the run, whatever the epochs; None for all steps of the epochs.

    Example:
        >>> plan = torchtune.supervision.StepPlan(batch_size=4, gradient_accumulation_steps=2, epochs=3)
        >>> plan.rows_per_step(data_size=8), plan.describe_steps(per_epoch=100)
        (64, '300 = 3 epochs of 100')
    """

    batch_size: int = 1
    gradient_accumulation_steps: int = 1
    epochs: int = 1
    max_steps_per_epoch: int | None = None
    max_steps: int | None = None

    @classmethod
    def of(cls, settings: Any) -> "StepPlan":
        """Read the plan from the settings of a recipe; a recipe without one of them has steps of one row, or one epoch.

        Raises:
            RecipeSettingsError: a name that the library reads is missing.
        """
        cfg = SettingsView.of(settings)
        batch_size = cfg.batch_size or 1
        accumulation = cfg.gradient_accumulation_steps or 1
        max_steps_per_epoch = cfg.max_steps_per_epoch
        if cfg.reward_and_value_model is not None:
            # PPO's batch_size is the rows of a step, and its num_steps the answers of the run.
            if cfg.num_steps is not None:
                max_steps_per_epoch = cfg.num_steps // batch_size
            batch_size = max(batch_size // accumulation, 1)
        return cls(batch_size, accumulation, cfg.epochs or 1, max_steps_per_epoch, cfg.max_steps)

    def rows_per_step(self, data_size: int) -> int:
        """Return the global batch: the rows of an optimizer step on ``data_size`` data-parallel ranks."""
        return self.batch_size * self.gradient_accumulation_steps * data_size

    def count_steps(self, per_epoch: int) -> int:
        """Return the optimizer steps of the run."""
        return self.max_steps or self.epochs * per_epoch

    def count_epochs(self, per_epoch: int) -> int:
        """Return the number of epochs that the run begins."""
        if self.max_steps is None:
            return self.epochs
        return math.ceil(self.max_steps / per_epoch)

    def describe_steps(self, per_epoch: int) -> str:
        """Return text such as ``"12 = 2 epochs of 6"``."""
        if self.max_steps is not None:
            return f"{self.max_steps:,} (max_steps), of {per_epoch:,} per epoch"
        epochs = "1 epoch" if self.epochs == 1 else f"{self.epochs} epochs"
        return f"{self.epochs * per_epoch:,} = {epochs} of {per_epoch:,}"

    def steps_per_epoch(self, examples: int, data_size: int) -> int:
        """Return the optimizer steps of an epoch; the loader counts them, so that a run has the same number."""
        loader = BatchLoader(
            range(examples),
            batch_size=self.batch_size,
            collate_fn=list,
            shuffle=False,
            seed=0,
            accumulation_steps=self.gradient_accumulation_steps,
            max_steps_per_epoch=self.max_steps_per_epoch,
            world_size=data_size,
        )
        return len(loader)

    def describe_batch(self, data_size: int, examples: int | None = None) -> str:
        """Describe the global batch.

        Args:
            data_size: number of data-parallel ranks.
            examples: rows or packs per epoch, if known; too few for a step are mentioned.
        """
        parts = [f"{self.batch_size} (batch_size)", f"{self.gradient_accumulation_steps} (accumulation)"]
        if data_size > 1:
            parts.append(f"{data_size} (data-parallel ranks)")
        text = f"{self.rows_per_step(data_size):,} rows a step = {' x '.join(parts)}"
        shortage = self.explain_short_epoch(data_size, examples)
        if shortage is None:
            return text
        return f"{text}; {shortage}"

    def explain_short_epoch(self, data_size: int, examples: int | None) -> str | None:
        """Return a sentence if an epoch has too few examples for a step; see :meth:`describe_batch`."""
        if examples is None or examples >= self.rows_per_step(data_size):
            return None
        # The largest batch of which an epoch has enough for a step; 0 if even single rows are too few.
        largest_batch = examples // (self.gradient_accumulation_steps * data_size)
        if largest_batch:
            advice = f"batch_size to at most {largest_batch:,}"
        else:
            advice = "batch_size and gradient_accumulation_steps lower"
        return f"an epoch has only {examples:,} rows or packs, one incomplete step: set {advice}"
