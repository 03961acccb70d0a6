"""What a run logs and records before its first step and after its last, and its report."""

import dataclasses
import hashlib
import json
import logging
import math
import os
import platform
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import torchtune
from torchtune._recipe_registry import CONFIGS, current_name, recipe_at
from torchtune.checkpoints import ADAPTER_FILE, CheckpointStore, best_record, complete_directories
from torchtune.config import SettingsView, as_written, read_document, redact_secrets, to_dict
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, Batch, BatchLoader
from torchtune.datasets import explain_shared_rows, num_left_out
from torchtune.estimate import count_parameters
from torchtune.modules import text_decoder
from torchtune.reports._before_and_after import Measurement
from torchtune.reports._page import duration, write_report
from torchtune.reports._run_folder import RECORD, SETTINGS, RunFolder
from torchtune.reports._verdict import judge
from torchtune.supervision import (
    BestValidation,
    StepMetrics,
    StepPlan,
    describe_interval,
    explain_no_validation,
    observe_together,
)
from torchtune.tokenizers import decode_pieces, document_texts
from torchtune.training import undisturbed_random_state
from torchtune.training.metric_logging import flatten_dict
from torchtune.training.parallel import ParallelDims, broadcast_object, checksum_trained
from torchtune.training.precision import best_dtype
from torchtune.utils import (
    ObserverGuard,
    UserError,
    append_line,
    get_logger,
    is_simulated,
    log_rank_zero,
    logged_once,
    valid_json,
)

_SAMPLE_ROWS = 5
_LENGTH_BINS = 24
_MOST_TOKENS = 4000  # of a sample row
# Parts of the report that can fail one by one, while the others and the run go on.
_PARTS = ("summary", "measurement", "answers", "record", "data", "page")


class RunReport:
    """Logs a summary of the run before its first step, and the verdict, result and next command at its end, on rank 0.

    It measures the model on a few rows before the first step and after the last (see docs/reports.rst), and writes
    ``report.html`` and ``report.json`` to ``output_dir``; as a context manager, also if the run fails. It warns if no
    trained parameter has changed. What fails here is logged once, and the run goes on.

    Args:
        cfg: settings of the recipe.
        recipe_file: ``__file__`` of the recipe.
        dims: processes of the run.
        device: device of this process.
        model: the model that is trained, in its state before the next step.
        tokenizer: tokenizer of the run.
        loader: loader of the training data.
        loader_val: loader of the validation data, or None.
        checkpointer: loads the best checkpoint at the end, to measure it.
        best: the best validation.
        step_metrics: first and last values of the run's metrics.
        total_steps: steps of the run.
        rows_per_loss: number of rows that the loss compares with each other.

    Raises:
        RecipeSettingsError: there will be no validation, although the settings need one.
        UserError: the data has no images and the text decoder of a composite model is frozen: it would learn nothing.

    Example:
        >>> with torchtune.reports.RunReport(cfg, __file__, dims, device, model, ...) as report:  # doctest: +SKIP
        ...     report.start(recipe.global_step, compute_loss=recipe.compute_loss)
        ...     code = recipe.train()
        ...     report.end(recipe.global_step, code, compute_loss=recipe.compute_loss)
    """

    def __init__(
        self,
        cfg: Any,
        recipe_file: str,
        dims: ParallelDims,
        device: torch.device,
        model: torch.nn.Module,
        tokenizer: Any,
        loader: BatchLoader,
        loader_val: BatchLoader | None,
        checkpointer: CheckpointStore,
        best: BestValidation,
        step_metrics: StepMetrics,
        total_steps: int,
        *,
        rows_per_loss: int = 1,
    ) -> None:
        _check_images(model, loader.dataset)
        self._cfg = SettingsView.of(cfg)
        self._step_plan = StepPlan.of(cfg)
        self._recipe_file = recipe_file
        self._dims = dims
        self._device = device
        self._model = model
        self._tokenizer = tokenizer
        self._loader = loader
        self._loader_val = loader_val
        self._checkpointer = checkpointer
        self._best = best
        self._step_metrics = step_metrics
        self._total_steps = total_steps
        self._rows_per_loss = rows_per_loss
        self._folder = Path(self._cfg.output_dir)
        self._writes = dims.is_main and not is_simulated()
        self._start_time = time.monotonic()
        self._first_step = 0
        self._step = 0
        self._has_ended = False
        self._measurement: Measurement | None = None
        self._initial_checksum: Any = None
        self._shared_rows: str | None = None
        self._unused_validation = explain_no_validation(self._cfg, total_steps)
        # Everything from here on only watches the run.
        self._guards = {name: ObserverGuard(f"report: {name}") for name in _PARTS}

    def start(
        self,
        step: int,
        *,
        compute_loss: Callable[[Batch], torch.Tensor] | None = None,
        sample: Callable[..., Any] | None = None,
    ) -> None:
        """Log what the run will do, and measure the model unless the run is resumed. A collective.

        Args:
            step: number of completed steps.
            compute_loss: measures the model by the loss of each row; returns the sum of the losses of a batch.
            sample: measures the model by the reward of greedy answers instead, as ``sample(batches, 1, greedy=True)``.
        """
        self._first_step = step
        self._step = step
        self._initial_checksum = self._guards["summary"].call(lambda: checksum_trained(self._model))
        if self._loader_val is not None and self._writes:
            validation_data = self._loader_val.dataset
            self._shared_rows = self._guards["data"].call(
                lambda: explain_shared_rows(validation_data, self._loader.dataset)
            )
        self._guards["summary"].call(self._log_summary)
        if not is_simulated():
            recorded_rows = None
            if step > 0:
                # A resumed run measures the rows that were measured before its first step. Rank 0 reads the folder for
                # all, because other machines may not see it.
                if self._dims.is_main:
                    recorded_rows = self._guards["record"].call(lambda: RunFolder(self._folder).measured("before"))
                    recorded_rows = (recorded_rows or {}).get("rows")
                recorded_rows = broadcast_object(recorded_rows)
            self._measurement = self._together(
                lambda: Measurement(
                    self._cfg,
                    self._dims,
                    self._model,
                    self._tokenizer,
                    self._loader,
                    self._loader_val,
                    total_steps=self._total_steps,
                    rows_per_loss=self._rows_per_loss,
                    recorded_rows=recorded_rows,
                    answers_guard=self._guards["answers"],
                )
            )
        if self._writes:
            facts: dict[str, Any] = {"step": self._step, "total_steps": self._total_steps}
            # A part that fails is left out; its guard has warned.
            facts |= self._guards["record"].call(
                lambda: describe_start(self._cfg.source, self._recipe_file, self._dims, self._device), default={}
            )
            facts |= self._guards["data"].call(self._describe_model_and_data, default={})
            self._guards["record"].call(lambda: append_record(self._folder, "start", facts))
        if step == 0:  # a resumed run is compared with the measurement before its first step
            self._measure("before", compute_loss, sample)

    def end(
        self,
        step: int,
        code: int,
        *,
        compute_loss: Callable[[Batch], torch.Tensor] | None = None,
        sample: Callable[..., Any] | None = None,
    ) -> int:
        """Measure the model as :meth:`start` did, log the result of the run and write its report. A collective.

        Args:
            step: number of completed steps.
            code: result of ``train``, the exit code.
            compute_loss: see :meth:`start`.
            sample: see :meth:`start`.

        Returns:
            ``code``.
        """
        self._step = step
        num_steps = step - self._first_step
        took = duration(time.monotonic() - self._start_time)
        # On any rank: each has its own shards of the parameters. What is unknown counts as changed.
        checksum = self._guards["summary"].call(lambda: checksum_trained(self._model))
        is_unknown = checksum is None or self._initial_checksum is None
        has_changed = self._dims.any(is_unknown or checksum != self._initial_checksum)
        is_finished = step >= self._total_steps
        stops_early = code == 0 and self._best.should_stop
        if is_finished or stops_early:  # a run that was stopped is measured when it has been resumed and ends
            self._measure_result(compute_loss, sample)
        if is_finished:
            state = "has finished"
            text = f"Finished {num_steps:,} steps in {took}."
        elif stops_early:
            state = "has stopped early"
            text = f"Stopped early, after {num_steps:,} steps in {took}: {self._best.stop_reason()}."
        else:
            state = "was stopped"
            text = f"Stopped after {num_steps:,} steps in {took}."
        if is_finished or stops_early:
            rows = self._guards["summary"].call(self._result_rows, default=[])
        else:
            rows = self._guards["summary"].call(self._resume_rows, default=[])
        log_rank_zero(get_logger(), "\n".join([text, _align_rows(rows)]).rstrip())
        # Without a step, unchanged parameters prove nothing.
        self._write_report(state, code=code, changed=has_changed or num_steps == 0)
        if num_steps > 0 and not has_changed and self._writes:
            skipped = self._guards["record"].call(lambda: len(RunFolder(self._folder).skipped_steps), default=0)
            reason = ""
            if skipped:
                reason = f"; {skipped} steps were skipped"
            log_rank_zero(
                get_logger(),
                f"NOTHING WAS TRAINED: no trained parameter differs from what it was {num_steps:,} steps ago{reason}. "
                "Raise optimizer.lr, or look at lr and grad_norm in the metrics.",
                logging.WARNING,
            )
        return code

    def __enter__(self) -> "RunReport":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is not None and not self._has_ended:
            sentence, _, _ = str(error).strip().partition("\n")
            self._write_report("has failed", error=kind.__name__, sentence=sentence)

    def _together(self, function: Callable[[], Any]) -> Any:
        """Call a part of the measurement on all ranks, or leave it out on all."""
        return observe_together(self._guards["measurement"], function, self._dims)

    # Before the first step

    def _log_summary(self) -> None:
        """Log the facts of the run, and warn of what its settings leave unused or share."""
        logger = get_logger()
        log_rank_zero(logger, f"This run:\n{_align_rows(self._summary_rows())}")
        if self._unused_validation is not None:
            log_rank_zero(logger, f"dataset_val: {self._unused_validation}.", logging.WARNING)
        short = self._step_plan.explain_short_epoch(self._dims.data_size, self._loader.examples_per_epoch)
        if short is not None:
            rows = self._step_plan.rows_per_step(self._dims.data_size)
            log_rank_zero(logger, f"The batch has {rows:,} rows, but {short}.", logging.WARNING)
        if self._shared_rows is not None:
            log_rank_zero(logger, f"dataset_val: {self._shared_rows}.", logging.WARNING)

    def _summary_rows(self) -> list[tuple[str, str]]:
        """Return the (name, text) rows of the summary."""
        cfg = self._cfg
        base = cfg.checkpointer.get("checkpoint_dir")
        weights = "its own initial weights"  # of a checkpointer without a base, for models of the user's own
        if base is not None:
            weights = f"weights of {base}"
        total, trained = count_parameters(self._model)
        dataset = self._loader.dataset
        if dataset.is_stream:  # has no length
            size_of_data = "read while the run trains"
        else:
            noun = "packs" if dataset.is_packed else "rows"
            size_of_data = f"{len(dataset):,} {noun}"
        num_tokens = dataset.num_known_tokens
        if num_tokens is not None:
            size_of_data += f", {num_tokens:,} tokens"
        if self._loader_val is not None:
            size_of_data += f"; {len(self._loader_val.dataset):,} for validation"
        steps = self._step_plan.describe_steps(len(self._loader))
        if self._first_step > 0:
            steps += f", from step {self._first_step}"
        optimizer = _component_name(cfg.optimizer)
        if cfg.optimizer.get("lr") is not None:
            optimizer += f", lr {cfg.optimizer.get('lr')}"
        if cfg.lr_scheduler is not None:
            optimizer += f", {_component_name(cfg.lr_scheduler)}"
        every = describe_interval(cfg.save_every_n_steps)
        return [
            ("model", f"{_component_name(cfg.model)}, {weights}"),
            ("parameters", f"{trained:,} of {total:,} are trained ({trained / max(total, 1):.2%})"),
            ("data", size_of_data),
            ("batch", self._step_plan.describe_batch(self._dims.data_size, self._loader.examples_per_epoch)),
            ("steps", steps),
            ("optimizer", optimizer),
            ("runs on", f"{self._device.type} in {cfg.dtype}, {self._dims}"),
            ("writes to", f"{cfg.output_dir}, a checkpoint every {every}"),
            ("settings", str(self._folder / SETTINGS)),
        ]

    def _describe_model_and_data(self) -> dict[str, Any]:
        """Return the numbers of parameters, and facts about the data."""
        total, trained = count_parameters(self._model)
        data = {"dataset": describe_data(self._loader, self._tokenizer)}
        if self._loader_val is not None:
            data["dataset_val"] = describe_data(self._loader_val, self._tokenizer)
        if self._shared_rows is not None:
            data["dataset_val"]["shared"] = self._shared_rows
        return {"parameters": {"trained": trained, "all": total}, "data": data}

    # Measurements

    def _measure(self, when: str, compute_loss: Any, sample: Any, **facts: Any) -> None:
        """Measure the model and record the result; nothing in a simulation. A collective."""
        measurement = self._measurement
        if measurement is None:
            return
        if sample is not None:
            values = self._together(lambda: measurement.rewards(sample, self._step_metrics))
        elif compute_loss is not None:
            values = self._together(lambda: measurement.losses(compute_loss, self._step_metrics))
        else:
            return
        if values is not None and self._dims.is_main:
            record = {"when": when, "step": self._step, **facts, **values}
            self._guards["record"].call(lambda: append_record(self._folder, "measured", record))

    def _measure_result(self, compute_loss: Any, sample: Any) -> None:
        """Measure the weights that other commands use: those of the best checkpoint, or the last ones. A collective."""
        # Rank 0 reads the folder for all, because other machines may not see it.
        checkpoints = None
        if self._dims.is_main:
            checkpoints = self._guards["measurement"].call(self._best_and_last_checkpoint)
        checkpoints = broadcast_object(checkpoints)
        if self._measurement is None or checkpoints is None:
            self._measure("after", compute_loss, sample)
            return
        best, last = checkpoints
        if best["checkpoint"] == last.name:  # the model has these weights
            self._measure("after", compute_loss, sample, best=best)
            return
        if self._load_weights(self._folder / best["checkpoint"]):
            self._measure("after", compute_loss, sample, best=best)
        self._load_weights(last)  # a caller of the recipe may go on with its model

    def _best_and_last_checkpoint(self) -> tuple[dict[str, Any], Path] | None:
        """Return the record of the best checkpoint and the last one; None without a best one or saved last weights."""
        saved = complete_directories(self._folder)
        if not saved:
            return None
        last = saved[-1]
        best = best_record(self._folder)
        has_last_weights = last.name == f"step_{self._step}" or last.name.startswith("epoch")
        if best is None or not has_last_weights:
            return None
        return best, last

    def _load_weights(self, path: Path) -> bool:
        """Load the weights of a checkpoint of the run into the model; return whether it is done. A collective."""

        def load() -> bool:
            self._checkpointer.load_trained(path, self._model)
            return True

        return self._together(load) is not None

    # After the last step

    def _resume_rows(self) -> list[tuple[str, str]]:
        """Return the command that continues a run that was stopped; on several machines, each has its own."""
        processes = self._dims.world_size
        if processes != int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
            return [("go on with", "the same commands, with resume_from_checkpoint=True")]
        words = ["tune", "run"]
        if processes > 1:
            words += ["--nproc-per-node", str(processes)]
        recipe = recipe_at(self._recipe_file) or self._recipe_file
        if recipe != current_name(self._cfg.recipe):  # otherwise the config names it
            words.append(recipe)
        words += ["--config", str(self._folder / SETTINGS), "resume_from_checkpoint=True"]
        return [("go on with", shlex.join(words))]

    def _result_rows(self) -> list[tuple[str, str]]:
        """Return the result of a run that has ended, and the command that asks the model a question."""
        rows = self._metric_rows()
        left_out = num_left_out()
        if left_out:
            listed_in = self._folder / "skipped_rows.jsonl"
            rows.append(("left out", f"{left_out:,} rows of data, listed in {listed_in}"))
        best = self._best.best_checkpoint()
        if best is not None:
            path, value = best
            rows.append(("best", f"{path}, {value}"))
        saved = complete_directories(self._folder)
        if not saved:
            return rows
        last = saved[-1]
        base = self._cfg.checkpointer.get("checkpoint_dir")
        if (last / ADAPTER_FILE).is_file():
            rows.append(("result", f"{last}, an adapter in PEFT's layout for {base}"))
        elif not (last / "config.json").is_file():
            rows.append(("result", f"{last}, the state dict of a {type(self._model).__name__}"))
            return rows  # no command of the library builds it
        elif (last / "adapter").is_dir():
            text = f"{last}, a Hugging Face model with the adapter merged; the adapter is in adapter/"
            rows.append(("result", text))
        else:
            rows.append(("result", f"{last}, a Hugging Face model"))
        model_folder = last  # that the suggested command uses
        if best is not None:
            model_folder, _ = best
        description = getattr(text_decoder(self._model), "description", None)
        if description is not None and description.is_classifier:
            if description.problem_type is not None:  # not of a reward model, whose rows are pairs
                rows.append(("measure it", f"tune eval {shlex.quote(str(model_folder))} --data held_out.jsonl"))
            return rows
        if (last / "modules.json").is_file():  # an embedding model, which answers nothing
            rows.append(("measure it", f"tune eval {shlex.quote(str(model_folder))} --retrieval corpus.json"))
            return rows
        rows.append(("ask it", self._prompt_command(model_folder, base)))
        return rows

    def _metric_rows(self) -> list[tuple[str, str]]:
        """Return the first and the last value of each metric of the progress."""
        history = self._step_metrics.history
        rows = []
        for name, label in StepMetrics.PROGRESS.items():
            if name not in history:
                continue
            # The loss of group-relative methods stays near 0, whatever the answers are worth.
            if name == "loss" and "rewards/total" in history:
                continue
            (first_step, first), (last_step, last) = history[name]
            if math.isfinite(last):
                rows.append((label, f"{first:.4f} at step {first_step:,}, {last:.4f} at step {last_step:,}"))
        return rows

    def _prompt_command(self, folder: Path, base: Any) -> str:
        """Return the command that asks the model of a checkpoint a question."""
        dtype = self._cfg.dtype or best_dtype(self._device)
        if (folder / ADAPTER_FILE).is_file():
            words = ["tune", "chat", "--model", str(base), "--adapter", str(folder), "--dtype", dtype]
            return shlex.join(words)
        words = ["tune", "run", "generate", "--config", "any_generation", f"device={self._device.type}"]
        words += [f"dtype={dtype}", f"checkpointer.checkpoint_dir={folder}"]
        return f"{shlex.join(words)} prompt.user={json.dumps('Who are you?')}"

    def _write_report(self, state: str, **facts: Any) -> None:
        """Record the end, write the report and log the verdict, on the main rank."""
        self._has_ended = True  # an error from here on makes no second report
        if not self._writes:  # another rank, or a simulation
            return
        record = {
            "step": self._step,
            "state": state,
            "seconds": time.monotonic() - self._start_time,
            "layers": self._guards["record"].call(lambda: describe_layers(self._model), default={}),
            "notes": logged_once(),
            **facts,
        }
        self._guards["record"].call(lambda: append_record(self._folder, "end", record))

        def log_verdict() -> None:
            run = RunFolder(self._folder)
            rows = [("verdict", str(judge(run))), ("report", str(write_report(run)))]
            get_logger().info(f"The run {state}.\n{_align_rows(rows)}")

        self._guards["page"].call(log_verdict)


def _check_images(model: torch.nn.Module, dataset: Any) -> None:
    """Raise if a composite model with a frozen text decoder is trained on data without images."""
    has_frozen_text = getattr(model, "has_frozen_text", None)
    if has_frozen_text is None or not has_frozen_text():
        return
    # A user's own dataset may have images; the model warns during the run if it has none.
    if not dataset.may_have_images:
        raise UserError(
            "dataset: it has no images, and text alone trains nothing of this model, whose text decoder is frozen: "
            "train that (language_model or decoder_trainable), or use a dataset with images."
        )


def _align_rows(rows: Sequence[tuple[str, str]]) -> str:
    """Return lines ``  name        text``."""
    return "\n".join(f"  {name:<12}{text}" for name, text in rows)


def _component_name(node: Any) -> str:
    """Return the last part of a component's dotted path."""
    return as_written(str(node.get("_component_"))).rpartition(".")[2]


def append_record(output_dir: Path, event: str, values: Mapping[str, Any]) -> None:
    """Append an event with its time to the record of a run; if the disk is full, the run goes on without it."""
    record = valid_json({"event": event, "time": time.time(), **values})
    line = json.dumps(record, ensure_ascii=False, default=str)
    append_line(output_dir / RECORD, redact_secrets(line))


def describe_start(settings: Any, recipe_file: str, dims: ParallelDims, device: torch.device) -> dict[str, Any]:
    """Return the code, machine and settings at the start of a process of the run.

    Args:
        settings: settings of the recipe.
        recipe_file: file of the recipe, which may be a copy.
        dims: processes of the run.
        device: device of this process.
    """
    facts: dict[str, Any] = {
        "recipe": recipe_at(recipe_file) or recipe_file,
        "config": None,
        "changed": {},
        "processes": dims.world_size,
        "parallel": str(dims),
        "code": {
            "torchtune": torchtune.__version__,
            "torch": torch.__version__,
            "recipe": hashlib.sha256(Path(recipe_file).read_bytes()).hexdigest()[:12],
        },
        "host": platform.node(),
        "device": device.type,
        "memory_gib": None,
    }
    # The file given in the command of this process, in either spelling.
    config = None
    for word, next_word in zip(sys.argv, [*sys.argv[1:], ""], strict=True):
        if word == "--config":
            config = Path(next_word).resolve()
        elif word.startswith("--config="):
            config = Path(word.removeprefix("--config=")).resolve()
    if config is not None and config.is_file():
        facts["config"] = config
        if config.is_relative_to(CONFIGS):  # a shipped config is named as in `tune run --config`
            facts["config"] = str(config.relative_to(CONFIGS).with_suffix(""))
        facts["changed"] = _changed_settings(config, settings)
    if device.type == "cuda":
        facts["device"] = torch.cuda.get_device_name(device)
        facts["memory_gib"] = torch.cuda.get_device_properties(device).total_memory / 2**30
    return facts


def _changed_settings(config: Path, settings: Any) -> dict[str, list[Any]]:
    """Return setting -> [value in the config file, value of the run], where they differ."""
    in_file = {}
    for field in getattr(settings, "__dataclass_fields__", {}).values():
        if field.default is not dataclasses.MISSING:
            in_file[field.name] = field.default
    in_file |= flatten_dict(read_document(config).data)
    changed = {}
    for name, value in flatten_dict(to_dict(settings, redact=True)).items():
        is_reference = "${" in str(in_file.get(name))
        # Absent, null and empty settings mean the same.
        is_equal = (in_file.get(name) or None) == (value or None)
        if not is_equal and not is_reference:
            changed[name] = [in_file.get(name), value]
    return changed


def describe_layers(model: torch.nn.Module) -> dict[str, str]:
    """Return module type -> number of such modules and dtype of their weights, for modules with weights."""
    counts: Counter[tuple[str, str]] = Counter()
    for module in model.modules():
        weight = next(module.parameters(recurse=False), None)
        if weight is not None:
            counts[type(module).__name__, str(weight.dtype).removeprefix("torch.")] += 1
    return {name: f"{count} in {dtype}" for (name, dtype), count in counts.items()}


def describe_data(loader: BatchLoader, tokenizer: Any) -> dict[str, Any]:
    """Return facts about a loader's data: number of rows, digest, lengths, and samples with their trained tokens.

    Empty for a stream, which has no length, and whose rows would be read ahead of the run.
    """
    dataset = loader.dataset
    if dataset.is_stream:
        return {}
    rows = dataset
    parts = dataset.row_datasets()
    if dataset.is_packed and len(parts) == 1:  # packs are described by their rows
        rows = parts[0]
    facts: dict[str, Any] = {"rows": len(rows), "examples": len(dataset), "samples": []}
    if dataset.fingerprint is not None:
        digest = hashlib.sha256(repr(dataset.fingerprint).encode())
        facts["digest"] = digest.hexdigest()[:16]
    lengths = rows.known_lengths
    if lengths is not None:
        counts, edges = np.histogram(lengths, _LENGTH_BINS)
        facts["tokens"] = int(lengths.sum())
        facts["lengths"] = {"counts": counts.tolist(), "edges": edges.tolist()}
    num_samples = min(_SAMPLE_ROWS, len(rows))
    indices = np.linspace(0, len(rows) - 1, num_samples).astype(int).tolist()  # evenly spaced
    with undisturbed_random_state():  # a transform may draw random numbers
        for index in indices:
            facts["samples"] += _describe_row(index, rows[index], tokenizer)
    return facts


def _describe_row(index: int, row: Any, tokenizer: Any) -> list[dict[str, Any]]:
    """Return the texts of a row, in pieces that are trained or not; rows of preference data have several texts."""
    texts = []
    for _, tokens, labels in document_texts(row):
        pieces = decode_pieces(tokens[:_MOST_TOKENS], labels[:_MOST_TOKENS], tokenizer)
        texts.append(
            {
                "row": index,
                "tokens": len(tokens),
                "trained": int((labels != CROSS_ENTROPY_IGNORE_IDX).sum()),
                "pieces": [(text[:_MOST_TOKENS], is_trained) for text, is_trained in pieces],
            }
        )
    return texts
