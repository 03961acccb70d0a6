"""The report of recipes that were copied when it read their attributes itself."""

import sys
from typing import Any

from torchtune import reports
from torchtune.checkpoints import check_training_state
from torchtune.config import RecipeSettingsError
from torchtune.rlhf.loss import KTOLoss

_ATTRIBUTES = (
    "cfg",
    "model",
    "loader",
    "loader_val",
    "dims",
    "device",
    "checkpointer",
    "best",
    "step_metrics",
    "total_steps",
    "global_step",
)


class RunReport:
    """Report of a run, from the attributes of its recipe; recipes build :class:`torchtune.reports.RunReport` now.

    Args:
        recipe: recipe after ``setup``.

    Raises:
        RecipeSettingsError: the recipe lacks an attribute, or there will be no validation although the settings need
            one.
        UserError: the data has no images and the text decoder is frozen.

    Example:
        >>> report = torchtune.training.RunReport(recipe)  # doctest: +SKIP
    """

    def __init__(self, recipe: Any) -> None:
        for name in _ATTRIBUTES:
            if not hasattr(recipe, name):
                raise RecipeSettingsError(
                    f"{type(recipe).__name__} has no attribute '{name}' after setup, which training.RunReport reads: "
                    "set it, or leave the report out of recipe_main."
                )
        if hasattr(recipe, "training_state"):
            check_training_state(recipe.training_state())
        # KTO compares an answer with that of another row.
        rows_per_loss = 2 if isinstance(getattr(recipe, "loss_fn", None), KTOLoss) else 1
        self._recipe = recipe
        self._report = reports.RunReport(
            recipe.cfg,
            str(sys.modules[type(recipe).__module__].__file__),
            recipe.dims,
            recipe.device,
            recipe.model,
            getattr(recipe, "tokenizer", None),
            recipe.loader,
            recipe.loader_val,
            recipe.checkpointer,
            recipe.best,
            recipe.step_metrics,
            recipe.total_steps,
            rows_per_loss=rows_per_loss,
        )
        self._measured_by: dict[str, Any] = {}
        if hasattr(recipe, "sample"):
            self._measured_by["sample"] = recipe.sample
        elif hasattr(recipe, "compute_loss"):
            self._measured_by["compute_loss"] = recipe.compute_loss
        self._report.start(recipe.global_step, **self._measured_by)

    def __enter__(self) -> "RunReport":
        return self

    def __exit__(self, *error: Any) -> None:
        self._report.__exit__(*error)

    def end(self, code: int) -> int:
        """Log the result of the run, on all ranks after the last step. Return ``code``, the result of ``train``."""
        return self._report.end(self._recipe.global_step, code, **self._measured_by)
