"""Read the folder of a run: settings, metrics, measurements, events and checkpoints."""

import itertools
import json
import math
import os
import platform
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from torchtune.checkpoints import MARKER, best_checkpoint, best_record, complete_directories
from torchtune.reports._run_record import RECORD
from torchtune.utils import UserError, read_json

SETTINGS = "torchtune_config.yaml"
# Metrics that count from the start of a process.
_COUNTERS = ("processed_tokens", "trained_tokens", "elapsed_seconds")
_PAIR = re.compile(r"([^\s:][^:]*):(\S+)")
_SLOW = 3.0  # times the median step


class RunFolder:
    """Contents of the ``output_dir`` of a finished, running or killed run.

    Incomplete last lines of logs are skipped. A resumed run is one run: repeated steps count once, and tokens and
    seconds add up.

    Args:
        path: ``output_dir`` of a run, or one of its checkpoints.

    Attributes:
        path: ``output_dir``.
        settings: the resolved settings, with secrets redacted.
        events: records of ``logs/run.jsonl`` since the run began, oldest first.

    Raises:
        UserError: the folder is not the output folder of a run.

    Example:
        >>> torchtune.reports.RunFolder("/tmp/run").curve("loss")  # doctest: +SKIP
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path).expanduser()
        self.path = path.parent if (path / MARKER).exists() and (path.parent / SETTINGS).is_file() else path
        try:
            text = (self.path / SETTINGS).read_text(encoding="utf-8")
            self.settings: dict[str, Any] = dict(yaml.safe_load(text))
        except (OSError, yaml.YAMLError, ValueError, TypeError) as error:
            reason = "has no" if isinstance(error, OSError) else "has a damaged"
            raise UserError(f"{path} {reason} {SETTINGS}: give the output_dir of a run.") from error
        events = list(_read_lines(self.path / RECORD))
        starts = [i for i, event in enumerate(events) if event["event"] == "start" and not event["step"]]
        self.events = events[starts[-1] if starts else 0 :]

    @property
    def start(self) -> dict[str, Any]:
        """Facts of the first start; empty for a run of an earlier release."""
        return next((event for event in self.events if event["event"] == "start"), {})

    @property
    def end(self) -> dict[str, Any]:
        """The ``end`` event of the last process; empty while the process runs, or if it was killed."""
        last = [event for event in self.events if event["event"] != "measured"][-1:]
        return last[0] if last and last[0]["event"] == "end" else {}

    @property
    def base(self) -> Path:
        """Folder of the model that the run started from; it may be gone."""
        return Path(str((self.settings.get("checkpointer") or {}).get("checkpoint_dir")))

    def checkpoint(self) -> tuple[Path, str]:
        """Return the best checkpoint, or the last one if none is the best, and a phrase that describes it.

        Raises:
            UserError: there is no complete checkpoint.
        """
        saved, best = complete_directories(self.path), best_checkpoint(self.path)
        if not saved:
            raise UserError(f"{self.path}: the run has no complete checkpoint: wait for one, or start the run again.")
        found = saved[-1] if best is None else self.path / best
        run = "the run, which has not finished" if (saved[-1] / "state").is_dir() else "the run"
        return found, f"the {'last' if best is None else 'best'} checkpoint of {run}"

    @cached_property
    def best(self) -> dict[str, Any] | None:
        """``checkpoint``, ``step``, ``value`` and ``metric`` of the best checkpoint; None if the run keeps none."""
        try:
            return best_record(self.path)
        except UserError:  # a damaged file
            return None

    @property
    def recipe(self) -> str:
        """Name of the recipe."""
        return str(self.settings.get("recipe") or self.start.get("recipe"))

    @property
    def last_step(self) -> int:
        """Number of completed steps, as far as known."""
        return max([*self.steps, *(event["step"] for event in self.events)], default=0)

    @cached_property
    def state(self) -> str:
        """State of the run.

        One of ``has finished``, ``has stopped early``, ``was stopped``, ``has failed``, ``is going on``,
        ``was killed``, and ``is of an earlier release`` for a run without recorded events.
        """
        if self.end:
            return self.end["state"]
        try:
            owner = read_json(self.path / ".run.lock")
            if owner["host"] == platform.node():
                with suppress(PermissionError):  # of another user's process
                    os.kill(int(owner["pid"]), 0)
            return "is going on"
        except (UserError, OSError, KeyError, ValueError, TypeError):
            return "was killed" if self.events else "is of an earlier release"

    def measured(self, when: str) -> dict[str, Any]:
        """Return the last measurement ``"before"`` or ``"after"`` training; without ``values`` if there is none."""
        return next((event for event in reversed(self.events) if event.get("when") == when), {})

    @cached_property
    def steps(self) -> dict[int, dict[str, float]]:
        """Metrics of every logged step, in order; counters add up over resumes, unknown values are NaN."""
        found: dict[int, dict[str, float]] = {}
        base, last = dict.fromkeys(_COUNTERS, 0.0), dict.fromkeys(_COUNTERS, 0.0)
        for record in self._metric_lines():
            step = int(record.pop("step"))
            if any(record.get(name, math.inf) < last[name] for name in _COUNTERS):  # another process
                earlier = [values for number, values in found.items() if number < step and _COUNTERS[0] in values]
                base = {name: earlier[-1][name] if earlier else 0.0 for name in _COUNTERS}
            last |= {name: record[name] for name in _COUNTERS if name in record}
            found[step] = found.get(step, {}) | {name: value + base.get(name, 0) for name, value in record.items()}
        return dict(sorted(found.items()))

    def _metric_lines(self) -> Iterator[dict[str, float]]:
        node = self.settings.get("metric_logger") or {}
        name = node.get("filename") or f"log.{node.get('output_fmt', 'txt')}"
        # The folder may have been moved.
        path = next(
            (path for path in (Path(str(node.get("log_dir"))) / name, self.path / "logs" / name) if path.is_file()),
            None,
        )
        if path is None:
            return
        for record in _read_lines(path, "step"):
            yield {name: math.nan if value is None else value for name, value in record.items()}
        for head, rest in re.findall(r"^Step (\d+) \| (.*)\n", path.read_text("utf-8", "replace"), re.MULTILINE):
            yield {"step": int(head), **{name: float(text) for name, text in _PAIR.findall(rest) if _is_number(text)}}

    def curve(self, name: str) -> list[tuple[int, float]]:
        """Return (step, value) for every logged value of a metric."""
        return [(step, values[name]) for step, values in self.steps.items() if name in values]

    def last(self, name: str) -> float | None:
        """Return the last value of a metric or counter, None if it was never logged."""
        return next((value for _, value in reversed(self.curve(name))), None)

    @property
    def seconds(self) -> float:
        """Total seconds of the run's processes; a killed process counts up to its last metrics."""
        return max(sum(event.get("seconds", 0.0) for event in self.events), self.last("elapsed_seconds") or 0.0)

    @cached_property
    def skipped_steps(self) -> list[dict[str, Any]]:
        """Records of ``skipped_steps.jsonl``."""
        return list(_read_lines(self.path / "skipped_steps.jsonl", "step"))

    @cached_property
    def rows_left_out(self) -> dict[str, int]:
        """Reason -> number of rows of data that were left out."""
        return dict(Counter(str(row["reason"]) for row in _read_lines(self.path / "skipped_rows.jsonl", "reason")))

    @cached_property
    def checkpoints(self) -> dict[str, dict[str, str]]:
        """Name of each complete checkpoint -> CRC-32 of its files, oldest first."""
        return {path.name: read_json(path / MARKER).get("crc32", {}) for path in complete_directories(self.path)}

    def slow_steps(self) -> list[tuple[int, float, float]]:
        """Return (step, seconds, median) of steps over three times the median, excluding saving and validation."""
        times, rates = self.curve("elapsed_seconds"), {}
        for (before, start), (step, end) in itertools.pairwise(times):
            lost = sum(self.steps[step].get(f"lost_to_{phase}", 0.0) for phase in ("saving", "validation"))
            rates[step] = (end - start) * (1 - lost) / (step - before)
        middle = median(rates.values()) if rates else 0.0
        return [(step, rate, middle) for step, rate in rates.items() if rate > _SLOW * middle]

    def eval_scores(self) -> dict[str, dict[int, float]]:
        """Return the scores of the last model of each ``eval/*.results.json``: {"METRIC on DATA": {line: score}}."""
        found: dict[str, dict[int, float]] = {}
        for path in sorted((self.path / "eval").glob("*.results.json")):
            answers = path.parent / Path(str(read_json(path)["models"][-1].get("answers"))).name
            for row in _read_lines(answers, "scores"):
                for name, value in row["scores"].items():
                    if value is not None:
                        found.setdefault(f"{name} on {path.name.partition('.')[0]}", {})[row["line"]] = value
        return found


def describe_best(best: dict[str, Any]) -> str:
    """Return text such as ``"step_20, with the best val_loss, 1.234 at step 20"`` for a record of ``best.json``."""
    metric = str(best["metric"]).removeprefix("max:")
    return f"{best['checkpoint']}, with the best {metric}, {best['value']:.4g} at step {best['step']:,}"


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[-+]?(\d+\.?\d*(e[-+]?\d+)?|nan|inf)", text) is not None


def _read_lines(path: Path, key: str = "event") -> Iterator[dict[str, Any]]:
    """Yield the objects with ``key`` from a file of JSON lines; skip lines that a killed process wrote in part."""
    if not path.is_file():
        return
    for line in path.read_text("utf-8", "replace").splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and key in record:
            yield record
