"""Log messages before the first step of a run and after its last."""

import json
import logging
import math
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from torchtune.checkpoints import ADAPTER_FILE, best_record, complete_directories
from torchtune.data import BatchLoader
from torchtune.datasets import num_left_out
from torchtune.estimate import count_parameters
from torchtune.reports._charts import duration
from torchtune.reports._verdict import judge
from torchtune.reports._page import write_report
from torchtune.reports._before_and_after import Probe, describe_data
from torchtune.reports._run_folder import RunFolder
from torchtune.reports._run_record import append_record, describe_layers, describe_start
from torchtune.supervision import (
    PROGRESS_METRICS,
    BestValidation,
    StepGuard,
    StepMetrics,
    align_rows,
    component_name,
    count_steps,
    count_tokens,
    describe_global_batch,
    explain_no_validation,
    explain_shared_rows,
    explain_short_epoch,
    observe_together,
    rows_per_step,
)
from torchtune.training import RecipeSettingsError, SettingsView, checksum_trained
from torchtune.training.parallel import ParallelDims, broadcast_object
from torchtune.utils import ObserverGuard, UserError, get_logger, is_simulated, log_rank_zero, logged_once

T = TypeVar("T")
# Parts of the report that can fail one by one.
_PARTS = ("summary", "measurement", "answers", "record", "data", "page")


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
    """Logs a summary of the run before its first step, and the verdict, result and next command at its end, on rank 0.

    It measures the model on a few rows before the first step and after the last (see docs/reports.rst), and writes
    ``report.html`` and ``report.json`` to ``output_dir``; as a context manager, also if the run fails. It raises for a
    composite model with a frozen text decoder on a dataset without images, which would learn nothing, and warns if no
    trained parameter has changed.

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
                "train that (language_model or decoder_trainable), or use a dataset with images."
            )
        self._recipe, self._cfg, self._started = recipe, SettingsView.of(recipe.cfg), time.monotonic()
        self._folder, self._has_ended = Path(self._cfg.output_dir), False
        unused = explain_no_validation(self._cfg, recipe.total_steps)
        # Everything from here on only watches the run.
        self._guards = {name: ObserverGuard(f"report: {name}") for name in _PARTS}
        self._first_step = recipe.global_step
        self._initial_fingerprint = self._guarded("summary", lambda: checksum_trained(recipe.model))
        self._shared_rows = self._guarded("data", self._find_shared_rows)
        self._guarded("summary", lambda: self._log_summary(unused))
        self._probe = None if is_simulated() else self._together(lambda: Probe(recipe, self._guards["answers"]))
        if recipe.dims.is_main and not is_simulated():
            self._record_start()
        if not recipe.global_step:
            self._measure("before")

    def _guarded(self, part: str, function: Callable[[], T]) -> T | None:
        return self._guards[part].call(function)

    def _together(self, function: Callable[[], T]) -> T | None:
        """Call a part of the measurement on all ranks, or leave it out on all."""
        return observe_together(self._guards["measurement"], function, self._recipe.dims)

    def _log_summary(self, unused: str | None) -> None:
        recipe = self._recipe
        log_rank_zero(get_logger(), f"This run:\n{align_rows(list(self._summary_rows()))}")
        if unused is not None:
            log_rank_zero(get_logger(), f"dataset_val: {unused}.", logging.WARNING)
        short = explain_short_epoch(self._cfg, recipe.dims.data_size, recipe.loader.examples_per_epoch)
        if short is not None:
            rows = rows_per_step(self._cfg, recipe.dims.data_size)
            log_rank_zero(get_logger(), f"The batch has {rows:,} rows, but {short}.", logging.WARNING)
        if self._shared_rows is not None:
            log_rank_zero(get_logger(), f"dataset_val: {self._shared_rows}.", logging.WARNING)

    def _find_shared_rows(self) -> str | None:
        recipe = self._recipe
        if recipe.loader_val is None or not recipe.dims.is_main or is_simulated():
            return None
        return explain_shared_rows(recipe.loader_val.dataset, recipe.loader.dataset)

    def __enter__(self) -> "RunReport":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is not None and not self._has_ended:
            self._write_report("has failed", error=kind.__name__, sentence=str(error).strip().partition("\n")[0])

    def _record_start(self) -> None:
        recipe = self._recipe
        start: dict[str, Any] = {"step": recipe.global_step, "total_steps": recipe.total_steps}
        start |= self._guarded("record", lambda: describe_start(recipe)) or {}
        start |= self._guarded("data", self._describe_model_and_data) or {}
        self._guarded("record", lambda: append_record(self._folder, "start", start))

    def _describe_model_and_data(self) -> dict[str, Any]:
        total, trained = count_parameters(self._recipe.model)
        loaders = {"dataset": self._recipe.loader, "dataset_val": self._recipe.loader_val}
        tokenizer = getattr(self._recipe, "tokenizer", None)
        data = {name: describe_data(loader, tokenizer) for name, loader in loaders.items() if loader is not None}
        if self._shared_rows is not None:
            data["dataset_val"]["shared"] = self._shared_rows
        return {"parameters": {"trained": trained, "all": total}, "data": data}

    def _measure(self, when: str, **facts: Any) -> None:
        """Measure the model and record the result; nothing in a simulation. A collective."""
        if self._probe is None:
            return
        measured = self._together(self._probe.measure)
        if measured is not None and self._recipe.dims.is_main:
            record = {"when": when, "step": self._recipe.global_step, **facts, **measured}
            self._guarded("record", lambda: append_record(self._folder, "measured", record))

    def _measure_result(self) -> None:
        """Measure the weights that other commands use: those of the best checkpoint, or the last ones. A collective."""
        best, last = broadcast_object(self._guarded("measurement", self._best_and_last) or (None, None))
        if self._probe is None or best is None or best["checkpoint"] == last.name:
            self._measure("after", **({} if best is None else {"best": best}))
            return
        if self._load(self._folder / best["checkpoint"]):
            self._measure("after", best=best)
        self._load(last)  # a caller of the recipe may go on with its model

    def _best_and_last(self) -> tuple[dict[str, Any] | None, Path | None]:
        """Return the record of the best checkpoint and the path of the last; None if the last weights are not saved."""
        step, saved = self._recipe.global_step, complete_directories(self._folder)
        is_saved = bool(saved) and (saved[-1].name == f"step_{step}" or saved[-1].name.startswith("epoch"))
        return (best_record(self._folder), saved[-1]) if is_saved else (None, None)

    def _load(self, path: Path) -> bool:
        """Load the weights of a checkpoint of the run into the model; return whether it is done. A collective."""
        recipe = self._recipe
        return self._together(lambda: recipe.checkpointer.load_trained(path, recipe.model) or True) is not None

    def _write_report(self, state: str, **facts: Any) -> None:
        """Record the end, write the report and log the verdict, on the main rank; errors are only logged."""
        self._has_ended = True
        if self._recipe.dims.is_main and not is_simulated():
            self._record_end(state, facts)
            self._guarded("page", lambda: self._log_verdict(state))

    def _record_end(self, state: str, facts: Mapping[str, Any]) -> None:
        recipe = self._recipe
        layers = self._guarded("record", lambda: describe_layers(recipe.model)) or {}
        end = {"step": recipe.global_step, "state": state, "seconds": time.monotonic() - self._started}
        end |= {"layers": layers, "notes": logged_once(), **facts}
        self._guarded("record", lambda: append_record(self._folder, "end", end))

    def _log_verdict(self, state: str) -> None:
        run = RunFolder(self._folder)
        rows = [("verdict", str(judge(run))), ("report", str(write_report(run)))]
        get_logger().info(f"The run {state}.\n{align_rows(rows)}")

    def _summary_rows(self) -> Iterator[tuple[str, str]]:
        recipe, cfg, dims = self._recipe, self._cfg, self._recipe.dims
        total, trained = count_parameters(recipe.model)
        base = cfg.checkpointer.get("checkpoint_dir")
        weights = "its own initial weights" if base is None else f"weights of {base}"
        yield "model", f"{component_name(cfg.model)}, {weights}"
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
        """Log the result of the run, on all ranks after the last step. Return ``code``, the result of ``train``."""
        recipe, steps = self._recipe, self._recipe.global_step - self._first_step
        fingerprint = self._guarded("summary", lambda: checksum_trained(recipe.model))
        is_unknown = fingerprint is None or self._initial_fingerprint is None
        changed = recipe.dims.any(is_unknown or fingerprint != self._initial_fingerprint)
        took = duration(time.monotonic() - self._started)
        is_finished, stops_early = recipe.global_step >= recipe.total_steps, code == 0 and recipe.best.should_stop
        if is_finished or stops_early:
            self._measure_result()
        if is_finished:
            state, text = "has finished", f"Finished {steps:,} steps in {took}."
        elif stops_early:
            state = "has stopped early"
            text = f"Stopped early, after {steps:,} steps in {took}: {recipe.best.stop_reason()}."
        else:
            state, text = "was stopped", f"Stopped after {steps:,} steps in {took}."
        rows = self._guarded("summary", lambda: list(self._next_rows(is_finished or stops_early))) or []
        log_rank_zero(get_logger(), "\n".join([text, align_rows(rows)]).rstrip())
        self._write_report(state, code=code, changed=changed or not steps)
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

    def _next_rows(self, has_ended: bool) -> Iterator[tuple[str, str]]:
        """Yield the result of a run that has ended, or the command that goes on with one that was stopped."""
        if has_ended:
            yield from self._result_rows()
        else:
            yield "go on with", _resume_command(self._recipe)

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
        elif not (saved[-1] / "config.json").is_file():
            yield "result", f"{saved[-1]}, the state dict of a {type(self._recipe.model).__name__}"
            return  # no command of the library builds it
        else:
            inside = " with the adapter merged; the adapter is in adapter/" if (saved[-1] / "adapter").is_dir() else ""
            yield "result", f"{saved[-1]}, a Hugging Face model{inside}"
        yield "ask it", self._prompt_command(saved[-1] if kept is None else kept[0], base)

    def _prompt_command(self, folder: Path, base: Any) -> str:
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
