"""Tasks of the evaluation harness (lm-eval, extra ``eval``)."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from torchtune.config._errors import did_you_mean
from torchtune.datasets._load import without_waiting_for_the_hub
from torchtune.evaluation._errors import EvaluationError
from torchtune.evaluation._harness_images import without_images
from torchtune.generation import model_digest
from torchtune.utils import atomic_write, require
from torchtune.utils._files import os_errors_of

# Tasks of our own, which need no download.
_OWN = Path(__file__).parent / "tasks"


@dataclass(frozen=True)
class Tasks:
    """Names of tasks, and the harness's manager that knows them."""

    names: list[str]
    manager: Any


@dataclass(frozen=True)
class TaskResults:
    """Results of tasks.

    Attributes:
        by_task: name -> metric -> value, as the harness names them (``acc,none``).
        table: for people.
    """

    by_task: dict[str, dict[str, Any]]
    table: str


def find_tasks(names: Sequence[str], include_path: str | Path | None = None) -> Tasks:
    """Find tasks before a model is loaded.

    Args:
        names: of tasks, groups or tags: of the harness, of ``include_path``, or ``tune_facts``, ``tune_arithmetic``
            and ``tune_texts``, which need no download.
        include_path: folder with YAML files of tasks.

    Raises:
        EvaluationError: there is no such folder or task, or none is named.

    Example:
        >>> tasks = torchtune.evaluation.find_tasks(["tune_facts"])  # doctest: +SKIP
    """
    if not names:
        raise EvaluationError("no task is named: give names, for example tune_facts.")
    if include_path is not None and not Path(include_path).is_dir():
        raise EvaluationError(f"include_path: there is no folder {include_path}: correct the path.")
    manager_of = _manager_class()
    folders = [str(_OWN), *([str(include_path)] if include_path else [])]
    manager = manager_of(include_path=folders, include_defaults=False)
    missing = [name for name in names if name not in manager.all_tasks]
    if missing and not any(name.startswith("tune_") for name in missing):
        manager = manager_of(include_path=folders)  # reads thousands of files, for seconds
        missing = [name for name in names if name not in manager.all_tasks]
    if missing:
        hint = ": name one of the harness (`lm-eval ls tasks`), or the folder of yours in include_path."
        raise EvaluationError(f"there is no task '{missing[0]}'{did_you_mean(missing[0], manager.all_tasks) or hint}")
    return Tasks(list(names), manager)


def _manager_class() -> Any:
    base = require("lm_eval.tasks", extra="eval", purpose="An evaluation by tasks").TaskManager

    class Manager(base):  # type: ignore[misc, valid-type]
        """Says in a sentence what cannot be loaded or asked, and does not wait for a hub that does not answer."""

        # Why questions with images cannot be asked; None: they can.
        without_images: str | None = None

        def load(self, task_list: Any) -> Any:
            try:
                with without_waiting_for_the_hub():
                    found = super().load(task_list)
            except Exception as error:  # of the harness, of the datasets package, or of the code of a task
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
                raise EvaluationError(
                    f"{', '.join(map(str, task_list))}: the data cannot be loaded ({reason}): correct the task, or "
                    "connect to the hub once; tune_facts, tune_arithmetic and tune_texts need no download."
                ) from error
            for name, task in found["tasks"].items():
                if getattr(task.config, "doc_to_audio", None):
                    raise EvaluationError(f"tasks: {name} has sounds, which no model here hears: leave it out.")
                if getattr(task, "MULTIMODAL", False) and self.without_images:
                    raise EvaluationError(f"tasks: {name} has images, {self.without_images}")
            return found

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

    Args:
        model: the decoder, or a model of text and images, with its weights.
        tokenizer: of the model; that of a vision model where tasks have images.
        tasks: of :func:`find_tasks`.
        batch_size: sequences per forward pass, and answers that are generated at a time.
        max_length: longest sequence; longer ones lose their beginning. By default the context of the model.
        enable_kv_cache: generate with KV caches.
        limit: examples of each task.
        chat_template: ask in the template of the checkpoint, with examples as earlier turns.
        seed: of the examples in prompts.
        folder: of ``results.json`` and of a cache of all answers, from which an interrupted evaluation goes on.

    Raises:
        EvaluationError: a task asks for what the model cannot do, or its data cannot be loaded.

    Example:
        >>> tasks = torchtune.evaluation.find_tasks(["tune_facts"])  # doctest: +SKIP
        >>> print(torchtune.evaluation.evaluate_tasks(model, tokenizer, tasks).table)  # doctest: +SKIP
    """
    lm_eval = require("lm_eval", extra="eval", purpose="An evaluation by tasks")
    # The module derives a class of the harness, which is there only with the extra.
    from torchtune.evaluation._harness_model import HarnessModel

    harness = HarnessModel(
        model, tokenizer, batch_size=batch_size, max_length=max_length, enable_kv_cache=enable_kv_cache
    )
    tasks.manager.without_images = without_images(model, tokenizer)
    cache = None
    if folder is not None:
        with os_errors_of(Path(folder) / "results.json"):
            Path(folder).mkdir(parents=True, exist_ok=True)
        digest = model_digest(model, tokenizer)[:12]
        cache = str(Path(folder) / f"answers_{digest}_{harness.max_length}")
    logger = logging.getLogger("lm_eval.api.task")
    logger.addFilter(_is_news)
    try:
        found = lm_eval.simple_evaluate(
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
            bootstrap_iters=1000,
        )
    finally:
        logger.removeFilter(_is_news)
    if folder is not None:
        kept = {
            name: found[name] for name in ("results", "configs", "versions", "n-shot", "n-samples") if name in found
        }
        with atomic_write(Path(folder) / "results.json") as file:
            file.write((json.dumps(kept, indent=2, default=str) + "\n").encode())
    counts = {name: numbers.get("effective") for name, numbers in found.get("n-samples", {}).items()}
    return TaskResults(dict(found["results"]), _table(found["results"], counts))


def _is_news(record: logging.LogRecord) -> bool:
    """False for what the harness says of every task that brings its own rows."""
    return "Custom kwargs can be passed" not in record.getMessage()


def _table(results: Mapping[str, Mapping[str, Any]], counts: Mapping[str, int | None]) -> str:
    """A line for each metric of each task, with its standard error where there is one."""
    lines = [("task", "rows", "metric", "value")]
    for task, values in results.items():
        for name, value in values.items():
            metric, _, kind = name.partition(",")
            if metric == "sample_len" or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = values.get(f"{metric}_stderr,{kind}")
            shown = f"{value:.4g}" + (f" ± {error:.2g}" if isinstance(error, int | float) else "")
            label = metric if kind in ("", "none") else f"{metric} ({kind})"
            lines.append((task, str(counts.get(task) or ""), label, shown))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
