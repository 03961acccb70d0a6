"""Constraints between the settings of every training recipe."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torchtune._recipe_registry import recipe_at
from torchtune.config import SettingsView, as_written, did_you_mean
from torchtune.supervision import BestValidation
from torchtune.utils import UserError, parse_device


def shipped_recipe_of(settings: Any) -> str | None:
    """Return the name of the library's recipe that defines the class of settings; None for any other file."""
    file = getattr(sys.modules.get(type(settings).__module__), "__file__", None)
    if file is None:
        return None
    return recipe_at(file)


def check_settings(settings: Any) -> Iterator[tuple[str, str]]:
    """Yield (setting, problem and remedy) for settings that exclude each other.

    Args:
        settings: settings of a training recipe; see any recipe's ``Settings`` for the names.

    Raises:
        RecipeSettingsError: a name that the library reads is missing, or its value has the wrong type.
    """
    cfg = SettingsView.of(settings)
    if cfg.optimizer_in_bwd and cfg.clip_grad_norm is not None:
        yield "clip_grad_norm", "needs all gradients at once: set it to null or optimizer_in_bwd to False"
    if cfg.optimizer_in_bwd and (cfg.gradient_accumulation_steps or 1) > 1:
        yield "gradient_accumulation_steps", "must be 1 with optimizer_in_bwd, which keeps no gradients"
    # Cached gradients of an embedding model: every part of a batch has a backward pass of its own.
    if isinstance(cfg.loss, Mapping) and cfg.loss.get("texts_per_pass") is not None:
        if cfg.optimizer_in_bwd:
            yield "optimizer_in_bwd", "must be False with loss.texts_per_pass, which adds up gradients of passes"
        if (cfg.context_parallel_dim or 1) > 1:
            yield "context_parallel_dim", "must be 1 with loss.texts_per_pass, which does not split texts"
    if cfg.ac_mode is not None and cfg.enable_activation_checkpointing:
        yield "ac_mode", "recomputes some layers and enable_activation_checkpointing all of them: set one of the two"
    recomputes_every_nth = str(cfg.ac_option).isdigit() and int(cfg.ac_option) > 0
    if cfg.ac_mode == "selective" and cfg.ac_option != "op" and not recomputes_every_nth:
        yield "ac_option", "must be op or a number from 1 on with ac_mode=selective"
    if cfg.ac_option is not None and cfg.ac_mode != "selective":
        yield "ac_option", "needs ac_mode=selective"
    if cfg.enable_activation_offloading and not (cfg.enable_activation_checkpointing or cfg.ac_mode):
        yield "enable_activation_offloading", "needs enable_activation_checkpointing=True, or ac_mode"
    if cfg.enable_activation_offloading and cfg.device is not None and not cfg.device.startswith("cuda"):
        yield "enable_activation_offloading", f"needs device=cuda, not {cfg.device}"
    try:
        parse_device(cfg.device)
    except UserError as error:
        yield "device", str(error).removeprefix("device: ").rstrip(".")
    if cfg.fake_quant_after_n_steps is not None and cfg.quantizer is None:
        yield "fake_quant_after_n_steps", "needs a quantizer, which defines the simulated format"
    if cfg.run_val_every_n_steps is not None and cfg.dataset_val is None:
        yield "run_val_every_n_steps", "needs dataset_val"
    if cfg.scores and cfg.run_val_every_n_steps is None:
        yield "scores", "are measured during validation: set run_val_every_n_steps and dataset_val"
    if cfg.scores and (cfg.context_parallel_dim or 1) > 1:
        yield "scores", "need context_parallel_dim=1, because parts of a sequence cannot generate"
    if cfg.keep_best is not None:
        yield from _check_kept_score(cfg.keep_best, cfg.scores or ())
    has_own_metric = cfg.keep_best is not None and BestValidation.is_own_metric(cfg.keep_best)
    for name in ("keep_best", "early_stopping_patience"):
        if getattr(cfg, name) is not None and cfg.run_val_every_n_steps is None and not has_own_metric:
            yield name, "compares validation results: set run_val_every_n_steps and dataset_val"
    if has_own_metric and shipped_recipe_of(settings) is not None:
        yield (
            "keep_best",
            f"must be a validation metric, such as val_loss or max:val_accuracy, not {cfg.keep_best} (a copied recipe "
            "may pass one of its own to record_validation)",
        )


# Validation metrics with names like those of scores.
_OTHER_METRICS = ("val_accuracy", "val_entropy", "val_f1", "val_loss", "val_mae", "val_r2", "val_token_accuracy")


def _check_kept_score(keep_best: str, scores: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the problem of a ``keep_best`` that names a score wrongly; other metrics are known when a run validates."""
    from torchtune.evaluation import NAMED_SCORES, RETRIEVAL_SCORES  # slow to import

    metric = keep_best.removeprefix("max:")
    measured = []
    for score in scores:
        name = as_written(score).partition(":")[0]  # without a pattern
        if name == "retrieval":
            measured += [f"val_{metric_name}" for metric_name in RETRIEVAL_SCORES]
        else:
            measured.append(f"val_{name.rpartition('.')[2]}")
    if metric in measured:
        if metric == keep_best:
            yield "keep_best", f"would keep the lowest score: set max:{metric}, because more is better"
    elif metric.removeprefix("val_") in NAMED_SCORES:
        name = metric.removeprefix("val_")
        yield "keep_best", f"names {metric}, which is measured if scores has '{name}': set scores=[{name}]"
    elif metric not in _OTHER_METRICS:
        suggestion = did_you_mean(metric, measured)
        if suggestion:
            yield "keep_best", f"validation has no {metric}{suggestion}"
