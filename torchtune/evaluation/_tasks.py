"""Evaluate models on tasks of lm-eval (extra ``eval``)."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from torchtune.config import did_you_mean
from torchtune.datasets import without_waiting_for_the_hub
from torchtune.evaluation._eval_rows import EvaluationError
from torchtune.generation import model_digest
from torchtune.training.parallel import broadcast_object, is_sharded
from torchtune.utils import atomic_write, convert_os_errors, first_line, get_world_size_and_rank, require

# Tasks of this library, which need no download.
_OWN_TASKS = Path(__file__).parent / "tasks"


@dataclass(frozen=True)
class Tasks:
    """Names of tasks, and the lm-eval task manager that can load them."""

    names: list[str]
    manager: Any


@dataclass(frozen=True)
class TaskResults:
    """Results of tasks.

    Attributes:
        by_task: task -> metric -> value, with lm-eval's names (``acc,none``).
        table: the results as text.
    """

    by_task: dict[str, dict[str, Any]]
    table: str


def find_tasks(names: Sequence[str], include_path: str | Path | None = None) -> Tasks:
    """Find tasks, without loading a model.

    Args:
        names: names of tasks, groups or tags, from lm-eval or ``include_path``, or ``tune_facts``, ``tune_arithmetic``
            and ``tune_texts``, which need no download.
        include_path: folder with YAML files of tasks.

    Raises:
        EvaluationError: the folder or a task does not exist, or ``names`` is empty.

    Example:
        >>> tasks = torchtune.evaluation.find_tasks(["tune_facts"])  # doctest: +SKIP
    """
    if not names:
        raise EvaluationError("no task is named: give names, for example tune_facts.")
    if include_path is not None and not Path(include_path).is_dir():
        raise EvaluationError(f"include_path: there is no folder {include_path}: correct the path.")
    manager_of = _manager_class()
    folders = [str(_OWN_TASKS)]
    if include_path:
        folders.append(str(include_path))
    manager = manager_of(include_path=folders, include_defaults=False)
    missing = [name for name in names if name not in manager.all_tasks]
    # This library's own tasks are all loaded: a missing name with their prefix is mistyped, and lm-eval lacks it, too.
    if missing and not any(name.startswith("tune_") for name in missing):
        manager = manager_of(include_path=folders)  # reads thousands of files, which takes seconds
        missing = [name for name in names if name not in manager.all_tasks]
    if missing:
        hint = ": name one of the harness (`lm-eval ls tasks`), or the folder of yours in include_path."
        raise EvaluationError(f"there is no task '{missing[0]}'{did_you_mean(missing[0], manager.all_tasks) or hint}")
    return Tasks(list(names), manager)


def _manager_class() -> Any:
    """Return a subclass of lm-eval's task manager, which needs the extra."""
    base = require("lm_eval.tasks", extra="eval", purpose="An evaluation by tasks").TaskManager

    class Manager(base):  # type: ignore[misc, valid-type]
        """Task manager that raises readable errors and does not wait for an unreachable hub."""

        # Reason why the model cannot answer questions with images, set by evaluate_tasks; None: it can.
        no_images_reason: str | None = None

        def load(self, task_list: Any) -> Any:
            try:
                with without_waiting_for_the_hub():
                    loaded = super().load(task_list)
            except Exception as error:  # from lm-eval, the datasets package, or a task's code
                raise EvaluationError(
                    f"{', '.join(map(str, task_list))}: the data cannot be loaded ({first_line(error)}): correct the "
                    "task, or connect to the hub once; tune_facts, tune_arithmetic and tune_texts need no download."
                ) from error
            for name, task in loaded["tasks"].items():
                if getattr(task.config, "doc_to_audio", None):
                    raise EvaluationError(f"tasks: {name} has sounds, which no model here hears: leave it out.")
                if getattr(task, "MULTIMODAL", False) and self.no_images_reason:
                    raise EvaluationError(f"tasks: {name} has images, {self.no_images_reason}")
            return loaded

    return Manager


def evaluate_tasks(
    model: nn.Module,
    tokenizer: Any,
    tasks: Tasks,
    *,
    batch_size: int = 8,
    max_length: int | None = None,
    enable_kv_cache: bool = True,
    limit: int | None = None,
    chat_template: bool = False,
    seed: int = 1234,
    folder: str | Path | None = None,
) -> TaskResults:
    """Evaluate a model on tasks.

    All ranks of a sharded model call it together; they keep no cache of answers.

    Args:
        model: a decoder, or a model of text and images, with its weights.
        tokenizer: the model's tokenizer; for tasks with images, a vision model's.
        tasks: from :func:`find_tasks`.
        batch_size: sequences per forward pass, and answers generated at the same time.
        max_length: maximum sequence length; longer sequences are truncated on the left. By default the model's context.
        enable_kv_cache: generate with KV caches.
        limit: number of examples per task.
        chat_template: use the checkpoint's chat template, with few-shot examples as earlier turns.
        seed: seed of the few-shot examples.
        folder: folder of ``results.json`` and of a cache of answers, from which an interrupted evaluation resumes.

    Raises:
        EvaluationError: the model cannot handle a task, or its data cannot be loaded.

    Example:
        >>> tasks = torchtune.evaluation.find_tasks(["tune_facts"])  # doctest: +SKIP
        >>> print(torchtune.evaluation.evaluate_tasks(model, tokenizer, tasks).table)  # doctest: +SKIP
    """
    lm_eval = require("lm_eval", extra="eval", purpose="An evaluation by tasks")
    # Imported here because the module subclasses lm-eval, which needs the extra.
    from torchtune.evaluation._harness_model import HarnessModel

    harness = HarnessModel(
        model, tokenizer, batch_size=batch_size, max_length=max_length, enable_kv_cache=enable_kv_cache
    )
    tasks.manager.no_images_reason = harness.no_images_reason
    cache = None
    is_main = not is_sharded(model) or get_world_size_and_rank()[1] == 0
    if folder is not None and is_main:
        with convert_os_errors(Path(folder) / "results.json"):
            Path(folder).mkdir(parents=True, exist_ok=True)
    # Ranks that share a model ask it for the same answers, so that none may know some of them already.
    if folder is not None and not is_sharded(model):
        digest = model_digest(model, tokenizer)[:12]
        # The cache knows only the requests, but answers also depend on the model and on how it truncates.
        cache = str(Path(folder) / f"answers_{digest}_{harness.max_length}")
    logger = logging.getLogger("lm_eval.api.task")
    logger.addFilter(_should_log)  # drops a notice about tasks with local data
    try:
        evaluation = lm_eval.simple_evaluate(
            harness,
            tasks=tasks.names,
            task_manager=tasks.manager,
            limit=limit,
            apply_chat_template=chat_template,
            fewshot_as_multiturn=chat_template,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
            use_cache=cache,
            bootstrap_iters=1000,  # for standard errors; lm-eval's default of 100,000 takes long
        )
    finally:
        logger.removeFilter(_should_log)
    if folder is not None and is_main:
        _write_results(Path(folder) / "results.json", evaluation)
    results = None
    if evaluation is not None:  # lm-eval returns it on the first rank alone
        counts = {}  # examples of each task
        for name, numbers in evaluation.get("n-samples", {}).items():
            counts[name] = numbers.get("effective")
        results = TaskResults(dict(evaluation["results"]), _format_table(evaluation["results"], counts))
    if is_sharded(model):
        results = broadcast_object(results)
    return results


def _write_results(path: Path, evaluation: Mapping[str, Any]) -> None:
    """Write lm-eval's results, without the examples and the settings of the machine, which differ from run to run."""
    names = ("results", "configs", "versions", "n-shot", "n-samples")
    content = {name: evaluation[name] for name in names if name in evaluation}
    text = json.dumps(content, indent=2, default=str) + "\n"
    with atomic_write(path) as file:
        file.write(text.encode())


def _should_log(record: logging.LogRecord) -> bool:
    """Filter out lm-eval's notice about tasks with local data."""
    return "Custom kwargs can be passed" not in record.getMessage()


def _format_table(results: Mapping[str, Mapping[str, Any]], counts: Mapping[str, int | None]) -> str:
    """Format one line per metric and task, with the standard error if there is one."""
    lines = [("task", "rows", "metric", "value")]
    for task, values in results.items():
        for name, value in values.items():
            metric, _, kind = name.partition(",")
            # Not metrics: the number of rows, which has its own column, standard errors, and texts such as the alias.
            if metric == "sample_len" or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            number = f"{value:.4g}"
            error = values.get(f"{metric}_stderr,{kind}")
            if isinstance(error, int | float):
                number += f" ± {error:.2g}"
            label = metric
            if kind not in ("", "none"):  # a filter of answers, such as "strict-match"
                label = f"{metric} ({kind})"
            lines.append((task, str(counts.get(task) or ""), label, number))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = []
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        table.append("  ".join(cells).rstrip())
    return "\n".join(table)
