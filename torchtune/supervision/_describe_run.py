"""Sentences about the steps, the batches and the data of a run."""

from collections.abc import Sequence
from typing import Any

from torchtune.data import ExampleDataset
from torchtune.datasets import count_shared_rows
from torchtune.supervision._best_validation import is_own_metric
from torchtune.training import RecipeSettingsError, SettingsView

_WIDTH = 12  # width of the column of names


def align_rows(rows: Sequence[tuple[str, str]]) -> str:
    """Return lines ``  name        text``."""
    return "\n".join(f"  {name:<{_WIDTH}}{text}" for name, text in rows)


def count_steps(cfg: SettingsView, per_epoch: int) -> str:
    """Return text such as ``"12 = 2 epochs of 6"``."""
    epochs = "1 epoch" if cfg.epochs == 1 else f"{cfg.epochs} epochs"
    return f"{cfg.epochs * per_epoch:,} = {epochs} of {per_epoch:,}"


def explain_no_validation(cfg: SettingsView, steps: int) -> str | None:
    """Return why a run of this many steps never uses its validation data; None if it does, or has none.

    Raises:
        RecipeSettingsError: ``keep_best`` or ``early_stopping_patience`` needs a validation.
    """
    every = cfg.run_val_every_n_steps
    if cfg.dataset_val is None or (every is not None and every <= steps):
        return None
    if every is None:
        return "it is never measured: run_val_every_n_steps is not set"
    reason = f"run_val_every_n_steps is {every:,} and the run has {steps:,} steps: set it to at most that"
    if cfg.keep_best is not None and is_own_metric(cfg.keep_best):
        return f"it is never measured: {reason}"
    for name in ("keep_best", "early_stopping_patience"):
        if getattr(cfg, name) is not None:
            raise RecipeSettingsError(f"{name}: there would be no validation to compare, {reason}.")
    return f"it is never measured: {reason}"


def explain_shared_rows(held_out: Any, training: Any) -> str | None:
    """Return a sentence if rows of the validation data are training data; None if none is, or if it is not known.

    Args:
        held_out: dataset of the validation.
        training: dataset of the training.
    """
    counts = count_shared_rows(held_out, training)
    if counts is None or not counts[0]:
        return None
    shared, rows = counts
    which = f"all of its {rows:,} rows" if shared == rows else f"{shared:,} of its {rows:,} rows"
    return f"{which} are training data, too, so that it does not show how the model does on other rows"


def rows_per_step(cfg: SettingsView, data_size: int) -> int:
    return cfg.batch_size * cfg.gradient_accumulation_steps * data_size


def describe_global_batch(cfg: SettingsView, data_size: int, examples: int | None = None) -> str:
    """Describe the global batch: rows per optimizer step.

    Args:
        cfg: settings of a training recipe.
        data_size: number of data-parallel ranks.
        examples: rows or packs per epoch, if known; too few for a step are mentioned.
    """
    parts = [f"{cfg.batch_size} (batch_size)", f"{cfg.gradient_accumulation_steps} (accumulation)"]
    parts += [f"{data_size} (data-parallel ranks)"] if data_size > 1 else []
    text = f"{rows_per_step(cfg, data_size):,} rows a step = {' x '.join(parts)}"
    short = explain_short_epoch(cfg, data_size, examples)
    return text if short is None else f"{text}; {short}"


def explain_short_epoch(cfg: SettingsView, data_size: int, examples: int | None) -> str | None:
    """Return a sentence if an epoch has too few examples for a step; see :func:`describe_global_batch`."""
    if examples is None or examples >= rows_per_step(cfg, data_size):
        return None
    most = examples // (cfg.gradient_accumulation_steps * data_size)
    advice = f"batch_size to at most {most:,}" if most else "batch_size and gradient_accumulation_steps lower"
    return f"an epoch has only {examples:,} rows or packs, one incomplete step: set {advice}"


def component_name(node: Any) -> str:
    """Return the last part of a component's dotted path."""
    return str(node.get("_component_")).rpartition(".")[2]


def count_tokens(dataset: ExampleDataset) -> int | None:
    """Return the number of tokens in a dataset, if known without reading all rows."""
    lengths = dataset.known_lengths
    return None if lengths is None else int(lengths.sum())
