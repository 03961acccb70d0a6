"""Log messages before the first step of a run and after its last."""

import json
import logging
import math
import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from torchtune.checkpoints import ADAPTER_FILE, complete_directories
from torchtune.data import BatchLoader
from torchtune.datasets import num_left_out
from torchtune.modules.conversion import full_shapes
from torchtune.supervision._best_validation import BestValidation
from torchtune.supervision._step_guard import StepGuard
from torchtune.supervision._step_metrics import PROGRESS_METRICS, StepMetrics
from torchtune.training import RecipeSettingsError, SettingsView
from torchtune.training.parallel import ParallelDims
from torchtune.utils import UserError, get_logger, log_rank_zero

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
    for name in ("keep_best", "early_stopping_patience"):
        if getattr(cfg, name) is not None:
            raise RecipeSettingsError(f"{name}: there would be no validation to compare, {reason}.")
    return f"it is never measured: {reason}"


def _rows_per_step(cfg: SettingsView, data_size: int) -> int:
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
    text = f"{_rows_per_step(cfg, data_size):,} rows a step = {' x '.join(parts)}"
    short = explain_short_epoch(cfg, data_size, examples)
    return text if short is None else f"{text}; {short}"


def explain_short_epoch(cfg: SettingsView, data_size: int, examples: int | None) -> str | None:
    """Return a sentence if an epoch has too few examples for one step, else None; see :func:`describe_global_batch`."""
    if examples is None or examples >= _rows_per_step(cfg, data_size):
        return None
    most = examples // (cfg.gradient_accumulation_steps * data_size)
    advice = f"batch_size to at most {most:,}" if most else "batch_size and gradient_accumulation_steps lower"
    return f"an epoch has only {examples:,} rows or packs, one incomplete step: set {advice}"


def component_name(node: Any) -> str:
    """Return the last part of a component's dotted path."""
    return str(node.get("_component_")).rpartition(".")[2]


def checksum_bits(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield sums, modulo 2**64, of the bits of this rank's shard of a tensor."""
    if hasattr(tensor, "__tensor_flatten__"):  # sharded or quantized
        for name in tensor.__tensor_flatten__()[0]:
            if isinstance(inner := getattr(tensor, name), torch.Tensor):  # others are the device mesh
                yield from checksum_bits(inner)
        return
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    whole = data.numel() // 8 * 8
    yield data[:whole].view(torch.int64).sum()
    yield data[whole:].sum()


@torch.no_grad()
def _fingerprint(model: torch.nn.Module) -> list[int]:
    """Return a fingerprint of the bits of all trained parameters."""
    sums = [one for parameter in model.parameters() if parameter.requires_grad for one in checksum_bits(parameter)]
    return torch.stack([one.cpu() for one in sums]).tolist() if sums else []


def count_tokens(dataset: Any) -> int | None:
    """Return the tokens of a dataset (of all answers for preference data), if known without reading all rows."""
    if stores := getattr(dataset, "stores", None):
        return sum(int(store.lengths.sum()) for store in stores.values())
    lengths = None if getattr(dataset, "store", dataset) is None else getattr(dataset, "lengths", None)
    return None if lengths is None else int(sum(map(int, lengths)))


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds:.0f} s" if minutes else f"{seconds:.1f} s"


class TrainedRecipe(Protocol):
    """Attributes of a recipe that a report reads, after ``setup``."""

    cfg: Any
    model: torch.nn.Module
    loader: BatchLoader
    loader_val: BatchLoader | None
    dims: ParallelDims
    device: torch.device
    guard: StepGuard
    best: BestValidation
    step_metrics: StepMetrics
    total_steps: int
    global_step: int


class RunReport:
    """Logs on rank 0 a summary of the run, and at its end the result and the next command.

    It raises for a composite model with a frozen text decoder on a dataset without images, which would learn nothing,
    and warns if no trained parameter has changed.

    Args:
        recipe: recipe after ``setup``.

    Raises:
        RecipeSettingsError: the recipe lacks an attribute of ``TrainedRecipe`` or a setting, or there will be no
            validation although the settings need one.
        UserError: the data has no images and the text decoder is frozen.

    Example:
        >>> report = torchtune.training.RunReport(recipe)  # doctest: +SKIP
    """

    def __init__(self, recipe: TrainedRecipe) -> None:
        for name in TrainedRecipe.__annotations__:
            if not hasattr(recipe, name):
                raise RecipeSettingsError(
                    f"{type(recipe).__name__} has no attribute '{name}' after setup, which training.RunReport reads: "
                    "set it, or leave the report out of recipe_main."
                )
        frozen = getattr(recipe.model, "has_frozen_text", None)
        for key, value in getattr(recipe, "training_state", dict)().items():
            if not isinstance(value, Mapping) and not hasattr(value, "state_dict"):
                raise RecipeSettingsError(
                    f"training_state: '{key}' is a {type(value).__name__}, which a resume could not set: give a dict, "
                    f"{{'{key}': ...}}, or an object with state_dict and load_state_dict."
                )
        # Custom datasets do not have a number of images; they are warned about during the run.
        if frozen is not None and frozen() and not getattr(recipe.loader.dataset, "num_images", 1):
            raise UserError(
                "dataset: it has no images, and text alone trains nothing of this model, whose text decoder is frozen: "
                "train that (decoder_trainable, or adapters on it), or use a dataset with images."
            )
        self._recipe, self._cfg, self._started = recipe, SettingsView.of(recipe.cfg), time.monotonic()
        unused = explain_no_validation(self._cfg, recipe.total_steps)
        self._first_step, self._initial_fingerprint = recipe.global_step, _fingerprint(recipe.model)
        log_rank_zero(get_logger(), f"This run:\n{align_rows(list(self._summary_rows()))}")
        if unused is not None:
            log_rank_zero(get_logger(), f"dataset_val: {unused}.", logging.WARNING)
        short = explain_short_epoch(self._cfg, recipe.dims.data_size, recipe.loader.examples_per_epoch)
        if short is not None:
            rows = _rows_per_step(self._cfg, recipe.dims.data_size)
            log_rank_zero(get_logger(), f"The batch has {rows:,} rows, but {short}.", logging.WARNING)

    def _summary_rows(self) -> Iterator[tuple[str, str]]:
        recipe, cfg, dims = self._recipe, self._cfg, self._recipe.dims
        total = sum(map(math.prod, full_shapes(recipe.model).values()))
        trained = sum(parameter.numel() for parameter in recipe.model.parameters() if parameter.requires_grad)
        yield "model", f"{component_name(cfg.model)}, weights of {cfg.checkpointer.get('checkpoint_dir')}"
        yield "parameters", f"{trained:,} of {total:,} are trained ({trained / max(total, 1):.2%})"
        dataset = recipe.loader.dataset
        tokens = count_tokens(dataset)
        kind = "packs" if hasattr(dataset, "packs") else "rows"
        size = "read while the run trains" if getattr(dataset, "is_stream", False) else f"{len(dataset):,} {kind}"
        held_out = "" if recipe.loader_val is None else f"; {len(recipe.loader_val.dataset):,} for validation"
        yield "data", f"{size}{'' if tokens is None else f', {tokens:,} tokens'}{held_out}"
        yield "batch", describe_global_batch(cfg, dims.data_size, recipe.loader.examples_per_epoch)
        from_step = f", from step {recipe.global_step}" if recipe.global_step else ""
        yield "steps", count_steps(cfg, len(recipe.loader)) + from_step
        rate = cfg.optimizer.get("lr")
        schedule = "" if cfg.lr_scheduler is None else f", {component_name(cfg.lr_scheduler)}"
        yield "optimizer", f"{component_name(cfg.optimizer)}{'' if rate is None else f', lr {rate}'}{schedule}"
        yield "runs on", f"{recipe.device.type} in {cfg.dtype}, {dims}"
        every = "epoch" if cfg.save_every_n_steps is None else f"{cfg.save_every_n_steps} steps"
        yield "writes to", f"{cfg.output_dir}, a checkpoint every {every}"
        yield "settings", str(Path(cfg.output_dir) / "torchtune_config.yaml")

    def end(self, code: int) -> int:
        """Log the result of the run; all ranks call it after the last step. Return ``code``, that of ``train``."""
        recipe, steps = self._recipe, self._recipe.global_step - self._first_step
        changed = recipe.dims.any(_fingerprint(recipe.model) != self._initial_fingerprint)
        took = _duration(time.monotonic() - self._started)
        if recipe.global_step >= recipe.total_steps:
            text = f"Finished {steps:,} steps in {took}.\n{align_rows(list(self._result_rows()))}"
        elif code == 0 and recipe.best.should_stop:
            text = f"Stopped early, after {steps:,} steps in {took}: {recipe.best.stop_reason()}.\n"
            text += align_rows(list(self._result_rows()))
        else:
            resume = _resume_command(recipe)
            text = f"Stopped after {steps:,} steps in {took}.\n{align_rows([('go on with', resume)])}"
        log_rank_zero(get_logger(), text)
        if steps and not changed:
            skipped = recipe.guard.num_skipped
            reason = f"; {skipped} steps were skipped" if skipped else ""
            log_rank_zero(
                get_logger(),
                f"NOTHING WAS TRAINED: no trained parameter differs from what it was {steps:,} steps ago{reason}. "
                "Raise optimizer.lr, or look at lr and grad_norm in the metrics.",
                level=30,
            )
        return code

    def _result_rows(self) -> Iterator[tuple[str, str]]:
        history = self._recipe.step_metrics.history
        for name, label in PROGRESS_METRICS.items():
            # The loss of group-relative methods stays near 0.
            first, last = history.get(name, ((0, math.nan), (0, math.nan)))
            if math.isfinite(last[1]) and not (name == "loss" and "rewards/total" in history):
                yield label, f"{first[1]:.4f} at step {first[0]:,}, {last[1]:.4f} at step {last[0]:,}"
        if left_out := num_left_out():
            yield (
                "left out",
                f"{left_out:,} rows of data, listed in {Path(self._cfg.output_dir) / 'skipped_rows.jsonl'}",
            )
        kept = self._recipe.best.best_checkpoint()
        if kept:
            yield "best", f"{kept[0]}, {kept[1]}"
        saved = complete_directories(Path(self._cfg.output_dir))
        if not saved:
            return
        base = self._cfg.checkpointer.get("checkpoint_dir")
        if (saved[-1] / ADAPTER_FILE).is_file():
            yield "result", f"{saved[-1]}, an adapter in PEFT's layout for {base}"
        else:
            inside = " with the adapter merged; the adapter is in adapter/" if (saved[-1] / "adapter").is_dir() else ""
            yield "result", f"{saved[-1]}, a Hugging Face model{inside}"
        yield "ask it", self._prompt_command(saved[-1] if kept is None else kept[0], base)

    def _prompt_command(self, folder: Path, base: Any) -> str:
        """Return the command that prompts a checkpoint."""
        dtype = self._cfg.resolved_dtype()
        if (folder / ADAPTER_FILE).is_file():
            return shlex.join(["tune", "chat", "--model", str(base), "--adapter", str(folder), "--dtype", dtype])
        words = ["tune", "run", "generate", "--config", "any_generation", f"device={self._recipe.device.type}"]
        words += [f"dtype={dtype}", f"checkpointer.checkpoint_dir={folder}"]
        return f"{shlex.join(words)} prompt.user={json.dumps('Who are you?')}"


def _resume_command(recipe: TrainedRecipe) -> str:
    from torchtune._recipe_registry import current_name, recipe_at

    processes, local = recipe.dims.world_size, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if processes != local:
        return "the same commands, with resume_from_checkpoint=True"
    words = ["tune", "run", *(["--nproc-per-node", str(processes)] if processes > 1 else [])]
    file = type(recipe).setup.__code__.co_filename
    name = recipe_at(file) or file
    words += [] if name == current_name(getattr(recipe.cfg, "recipe", None)) else [name]  # else the config names it
    settings = Path(SettingsView.of(recipe.cfg).output_dir) / "torchtune_config.yaml"
    return shlex.join([*words, "--config", str(settings), "resume_from_checkpoint=True"])
