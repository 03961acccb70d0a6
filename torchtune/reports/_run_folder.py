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
from torchtune.utils import UserError, read_json

SETTINGS = "torchtune_config.yaml"
RECORD = "logs/run.jsonl"  # one JSON line for each start, measurement and end
# Metrics that count from the start of a process.
_COUNTERS = ("processed_tokens", "trained_tokens", "elapsed_seconds")
# "loss:1.25 lr:2e-05" in a line of a text log.
_METRIC = re.compile(r"([^\s:][^:]*):(\S+)")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*(e[-+]?\d+)?|nan|inf)")
_TEXT_LINE = re.compile(r"^Step (\d+) \| (.*)\n", re.MULTILINE)
_SLOW_FACTOR = 3.0  # of the median step
_TAIL_BYTES = 2**16  # of a log; a line of metrics has about one kibibyte


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
        is_checkpoint = (path / MARKER).exists() and (path.parent / SETTINGS).is_file()
        self.path = path.parent if is_checkpoint else path
        try:
            text = (self.path / SETTINGS).read_text(encoding="utf-8")
            self.settings: dict[str, Any] = dict(yaml.safe_load(text))
        except (OSError, yaml.YAMLError, ValueError, TypeError) as error:
            reason = "has no" if isinstance(error, OSError) else "has a damaged"
            raise UserError(f"{path} {reason} {SETTINGS}: give the output_dir of a run.") from error
        self.events: list[dict[str, Any]] = []
        for event in _read_lines(self.path / RECORD):
            if event["event"] == "start" and event["step"] == 0:  # a run that begins anew in the same folder
                self.events = []
            self.events.append(event)

    @property
    def start(self) -> dict[str, Any]:
        """Facts of the first start; empty for a run of an earlier release."""
        for event in self.events:
            if event["event"] == "start":
                return event
        return {}

    @property
    def end(self) -> dict[str, Any]:
        """The ``end`` event of the last process; empty while the process runs, or if it was killed."""
        for event in reversed(self.events):
            if event["event"] == "end":
                return event
            if event["event"] == "start":  # of a process that has not ended
                return {}
        return {}

    @property
    def base(self) -> Path:
        """Folder of the model that the run started from; it may be gone."""
        return Path(str((self.settings.get("checkpointer") or {}).get("checkpoint_dir")))

    def checkpoint(self) -> tuple[Path, str]:
        """Return the best checkpoint, or the last one if none is the best, and a phrase that describes it.

        Raises:
            UserError: there is no complete checkpoint.
        """
        saved = complete_directories(self.path)
        if not saved:
            raise UserError(f"{self.path}: the run has no complete checkpoint: wait for one, or start the run again.")
        last = saved[-1]
        run = "the run"
        if (last / "state").is_dir():  # only checkpoints of unfinished runs have a state to resume from
            run = "the run, which has not finished"
        best = best_checkpoint(self.path)
        if best is None:
            return last, f"the last checkpoint of {run}"
        return self.path / best, f"the best checkpoint of {run}"

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
        steps = [*self.steps]
        for event in self.events:
            steps.append(event["step"])
        return max(steps, default=0)

    @property
    def newest_step(self) -> int:
        """:attr:`last_step`, read from the end of the metrics file: the time does not grow with the run."""
        steps = [event["step"] for event in self.events]
        path = self._metrics_file()
        if path is not None:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
                tail = file.read().decode("utf-8", "replace")
            steps += [int(record["step"]) for record in _parse_metrics(tail)]
        return max(steps, default=0)

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
                    os.kill(int(owner["pid"]), 0)  # sends no signal, but raises if there is no such process
            return "is going on"
        except (UserError, OSError, KeyError, ValueError, TypeError):  # there is no lock, or no such process
            if self.events:
                return "was killed"
            return "is of an earlier release"

    def measured(self, when: str) -> dict[str, Any]:
        """Return the last measurement ``"before"`` or ``"after"`` training; without ``values`` if there is none."""
        for event in reversed(self.events):
            if event.get("when") == when:
                return event
        return {}

    @cached_property
    def steps(self) -> dict[int, dict[str, float]]:
        """Metrics of every logged step, in order; counters add up over resumes, unknown values are NaN."""
        steps: dict[int, dict[str, float]] = {}
        counted_before = dict.fromkeys(_COUNTERS, 0.0)  # by earlier processes
        last_counts = dict.fromkeys(_COUNTERS, 0.0)
        path = self._metrics_file()
        text = ""
        if path is not None:
            text = path.read_text("utf-8", "replace")
        for record in _parse_metrics(text):
            step = int(record.pop("step"))
            # The counters of a resumed run begin at 0 again.
            is_new_process = any(record.get(name, math.inf) < last_counts[name] for name in _COUNTERS)
            if is_new_process:
                counted_before = _counts_before(step, steps)
            # A step may have several records: of training and validation, and again of a run that resumes before it.
            values = steps.setdefault(step, {})
            for name, value in record.items():
                values[name] = value
                if name in _COUNTERS:
                    last_counts[name] = value
                    values[name] = value + counted_before[name]
        return dict(sorted(steps.items()))

    def _metrics_file(self) -> Path | None:
        """Return the file of a disk logger; None if the run had another logger."""
        node = self.settings.get("metric_logger") or {}
        name = node.get("filename") or f"log.{node.get('output_fmt', 'txt')}"
        # The folder of the run may have been moved since.
        for folder in (Path(str(node.get("log_dir"))), self.path / "logs"):
            if (folder / name).is_file():
                return folder / name
        return None

    def curve(self, name: str) -> list[tuple[int, float]]:
        """Return (step, value) for every logged value of a metric."""
        return [(step, values[name]) for step, values in self.steps.items() if name in values]

    def last(self, name: str) -> float | None:
        """Return the last value of a metric or counter, None if it was never logged."""
        curve = self.curve(name)
        if not curve:
            return None
        _, value = curve[-1]
        return value

    @property
    def seconds(self) -> float:
        """Total seconds of the run's processes; a killed process counts up to its last metrics."""
        of_ended_processes = sum(event.get("seconds", 0.0) for event in self.events)
        return max(of_ended_processes, self.last("elapsed_seconds") or 0.0)

    @cached_property
    def skipped_steps(self) -> list[dict[str, Any]]:
        """Records of ``skipped_steps.jsonl``."""
        return list(_read_lines(self.path / "skipped_steps.jsonl", "step"))

    @cached_property
    def rows_left_out(self) -> dict[str, int]:
        """Reason -> number of rows of data that were left out."""
        rows = _read_lines(self.path / "skipped_rows.jsonl", "reason")
        return dict(Counter(str(row["reason"]) for row in rows))

    @cached_property
    def checkpoints(self) -> dict[str, dict[str, str]]:
        """Name of each complete checkpoint -> CRC-32 of its files, oldest first."""
        checksums = {}
        for path in complete_directories(self.path):
            checksums[path.name] = read_json(path / MARKER).get("crc32", {})
        return checksums

    def slow_steps(self) -> list[tuple[int, float, float]]:
        """Return (step, seconds, median) of steps over three times the median, excluding saving and validation."""
        seconds_per_step = {}  # a mean over the steps since the last logged one
        for (previous_step, start), (step, end) in itertools.pairwise(self.curve("elapsed_seconds")):
            metrics = self.steps[step]
            share_lost = metrics.get("lost_to_saving", 0.0) + metrics.get("lost_to_validation", 0.0)
            seconds_per_step[step] = (end - start) * (1 - share_lost) / (step - previous_step)
        if not seconds_per_step:
            return []
        usual = median(seconds_per_step.values())
        slow_steps = []
        for step, seconds in seconds_per_step.items():
            if seconds > _SLOW_FACTOR * usual:
                slow_steps.append((step, seconds, usual))
        return slow_steps

    def eval_scores(self) -> dict[str, dict[int, float]]:
        """Return the scores of the last model of each ``eval/*.results.json``: {"METRIC on DATA": {line: score}}."""
        scores: dict[str, dict[int, float]] = {}
        for results in sorted((self.path / "eval").glob("*.results.json")):
            data = results.name.partition(".")[0]
            last_model = read_json(results)["models"][-1]
            answers = results.parent / Path(str(last_model.get("answers"))).name
            for row in _read_lines(answers, "scores"):
                for metric, score in row["scores"].items():
                    if score is not None:
                        scores.setdefault(f"{metric} on {data}", {})[row["line"]] = score
        return scores


def _parse_metrics(text: str) -> Iterator[dict[str, float]]:
    """Yield ``step`` and the metrics of each line that a metric logger wrote, as JSON or as text."""
    for record in _parse_lines(text, "step"):
        for name, value in record.items():
            if value is None:  # JSON has no NaN
                record[name] = math.nan
        yield record
    for step, metrics in _TEXT_LINE.findall(text):
        record = {"step": int(step)}
        for name, number in _METRIC.findall(metrics):
            if _NUMBER.fullmatch(number):
                record[name] = float(number)
        yield record


def describe_best(best: dict[str, Any]) -> str:
    """Return text such as ``"step_20, with the best val_loss, 1.234 at step 20"`` for a record of ``best.json``."""
    metric = str(best["metric"]).removeprefix("max:")
    return f"{best['checkpoint']}, with the best {metric}, {best['value']:.4g} at step {best['step']:,}"


def _counts_before(step: int, steps: dict[int, dict[str, float]]) -> dict[str, float]:
    """Return the counters of the last step below ``step`` that has them, from which a resumed process counts on."""
    counts = dict.fromkeys(_COUNTERS, 0.0)
    for logged_step, values in steps.items():
        if logged_step < step and _COUNTERS[0] in values:
            counts = {name: values[name] for name in _COUNTERS}
    return counts


def _read_lines(path: Path, key: str = "event") -> Iterator[dict[str, Any]]:
    """Yield the objects with ``key`` from a file of JSON lines; skip lines that a killed process wrote in part."""
    if path.is_file():
        yield from _parse_lines(path.read_text("utf-8", "replace"), key)


def _parse_lines(text: str, key: str) -> Iterator[dict[str, Any]]:
    """Yield the objects with ``key`` from JSON lines."""
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and key in record:
            yield record
