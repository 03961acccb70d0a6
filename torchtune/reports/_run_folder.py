"""Read the folder of a run: settings, metrics, measurements, events and checkpoints."""

import json
import math
import os
import platform
import re
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from torchtune.checkpoints import BEST, MARKER, complete_directories
from torchtune.reports._run_record import RECORD
from torchtune.utils import UserError, read_json

SETTINGS = "torchtune_config.yaml"
# Metrics that count from the start of a process.
_COUNTERS = ("processed_tokens", "trained_tokens", "elapsed_seconds")
_PAIR = re.compile(r"([^\s:][^:]*):(\S+)\s*")
_SLOW = 3.0  # times the median step


class RunFolder:
    """Everything that a run left in its ``output_dir``, also if it was killed or is going on.

    Incomplete last lines of logs are skipped. A run that was resumed is one run: steps that were repeated count once,
    and tokens and seconds add up.

    Args:
        path: ``output_dir`` of a run, or one of its checkpoints.

    Attributes:
        path: ``output_dir``.
        settings: the resolved settings, with secrets redacted.
        events: records of ``logs/run.jsonl`` since the run began, oldest first.

    Raises:
        UserError: the folder is not that of a run.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path).expanduser()
        self.path = path.parent if (path / MARKER).exists() and (path.parent / SETTINGS).is_file() else path
        try:
            text = (self.path / SETTINGS).read_text(encoding="utf-8")
            self.settings: dict[str, Any] = dict(yaml.safe_load(text))
        except OSError as error:
            raise UserError(f"{path} is no folder of a run, it has no {SETTINGS}: give the output_dir of a run.") from error
        except (yaml.YAMLError, ValueError, TypeError) as error:
            raise UserError(f"{self.path / SETTINGS} is damaged: restore it, the report needs the settings.") from error
        events = list(_read_lines(self.path / RECORD))
        starts = [i for i, event in enumerate(events) if event["event"] == "start" and not event.get("step")]
        self.events = events[starts[-1] if starts else 0 :]

    @property
    def start(self) -> dict[str, Any]:
        """Facts of the first start; empty for a run of an earlier release."""
        return next((event for event in self.events if event["event"] == "start"), {})

    @property
    def end(self) -> dict[str, Any] | None:
        """The end of the last process; None while it runs, or if it was killed."""
        last = next((event for event in reversed(self.events) if event["event"] in ("start", "end")), None)
        return last if last is not None and last["event"] == "end" else None

    @property
    def recipe(self) -> str:
        """Name of the recipe."""
        return str(self.settings.get("recipe") or self.start.get("recipe") or "unknown")

    @property
    def last_step(self) -> int:
        """Number of completed steps, as far as known."""
        return max([*self.steps, *(event.get("step", 0) for event in self.events)], default=0)

    @cached_property
    def state(self) -> str:
        """``finished``, ``stopped early``, ``stopped``, ``failed``, ``running`` or ``killed``."""
        if self.end is None:
            return "running" if self._is_running() else "killed" if self.events else "unknown"
        if "error" in self.end:
            return "failed"
        if self.end.get("stopped_early"):
            return "stopped early"
        return "finished" if self.end["step"] >= self.start.get("total_steps", math.inf) else "stopped"

    def _is_running(self) -> bool:
        try:
            owner = read_json(self.path / ".run.lock")
            if owner["host"] == platform.node():
                os.kill(int(owner["pid"]), 0)
            return True
        except PermissionError:
            return True
        except (UserError, OSError, KeyError, ValueError, TypeError):
            return False

    def measured(self, when: str) -> dict[str, Any] | None:
        """Return the last measurement ``"before"`` or ``"after"`` training, or None."""
        found = (event for event in reversed(self.events) if event["event"] == "measured" and event["when"] == when)
        return next(found, None)

    @cached_property
    def steps(self) -> dict[int, dict[str, float]]:
        """Metrics of every logged step, in order; counters add up over resumes, unknown values are NaN."""
        found: dict[int, dict[str, float]] = {}
        base, last = dict.fromkeys(_COUNTERS, 0.0), dict.fromkeys(_COUNTERS, 0.0)
        for record in self._metric_lines():
            step = int(record.pop("step"))
            if any(record.get(name, math.inf) < last[name] for name in _COUNTERS):  # the process is a new one
                before = [values for earlier, values in found.items() if earlier < step and _COUNTERS[0] in values]
                base = {name: before[-1][name] if before else 0.0 for name in _COUNTERS}
            for name in _COUNTERS:
                if name in record:
                    last[name] = record[name]
                    record[name] += base[name]
            found[step] = found.get(step, {}) | record
        return dict(sorted(found.items()))

    def _metric_lines(self) -> Iterator[dict[str, float]]:
        path = self.metrics_file
        if path is None:
            return
        if path.suffix == ".jsonl":
            for record in _read_lines(path, key="step"):
                yield {name: math.nan if value is None else value for name, value in record.items()}
            return
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                head, _, rest = line.partition(" | ")
                if line.endswith("\n") and re.fullmatch(r"Step \d+", head):
                    pairs = {name: _to_float(text) for name, text in _PAIR.findall(rest)}
                    yield {"step": float(head[5:]), **{name: value for name, value in pairs.items() if value is not None}}

    @property
    def metrics_file(self) -> Path | None:
        """The file of ``DiskLogger``, also if the folder was moved; None for other loggers."""
        node = self.settings.get("metric_logger") or {}
        name = node.get("filename") or f"log.{node.get('output_fmt', 'txt')}"
        places = (Path(str(node.get("log_dir"))) / name, self.path / "logs" / name)
        return next((path for path in places if path.is_file()), None)

    @cached_property
    def skipped_steps(self) -> list[dict[str, Any]]:
        """Records of ``skipped_steps.jsonl``."""
        return list(_read_lines(self.path / "skipped_steps.jsonl", key="step"))

    @cached_property
    def rows_left_out(self) -> Counter[str]:
        """Reason -> number of rows of data that were left out."""
        return Counter(str(row["reason"]) for row in _read_lines(self.path / "skipped_rows.jsonl", key="reason"))

    @cached_property
    def checkpoints(self) -> list[dict[str, Any]]:
        """Complete checkpoints, oldest first: ``name``, ``bytes``, and ``crc32`` of each file of weights."""
        found = []
        for folder in complete_directories(self.path):
            marker = read_json(folder / MARKER)
            sums = {name: text for name, text in marker.get("crc32", {}).items() if name.endswith(".safetensors")}
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            found.append({"name": folder.name, "bytes": size, "crc32": sums, "time": folder.stat().st_mtime})
        return found

    @cached_property
    def best(self) -> dict[str, Any] | None:
        """The best validation with a checkpoint: ``checkpoint``, ``step`` and ``value``."""
        try:
            return read_json(self.path / BEST)["best"][-1]
        except (UserError, KeyError, IndexError, TypeError):
            return None

    @property
    def seconds(self) -> float:
        """Seconds of all processes of the run, from start to end, or to the last metrics of one that was killed."""
        total, since = 0.0, None
        for event in self.events:
            if event["event"] == "start":
                since = event["time"]
            elif event["event"] == "end" and since is not None:
                total, since = total + event["time"] - since, None
        return max([total, *(values.get("elapsed_seconds", 0.0) for values in list(self.steps.values())[-1:])])

    def counted(self, name: str) -> float | None:
        """Return a counter at the last step: ``processed_tokens``, ``trained_tokens``; None if it was not logged."""
        return next((values[name] for values in reversed(self.steps.values()) if name in values), None)

    def slow_steps(self) -> list[tuple[int, float, float]]:
        """Return (step, seconds, median) of steps over three times as long as the median, without saving or validation."""
        rates, previous = {}, None
        for step, values in self.steps.items():
            if previous is not None and "elapsed_seconds" in values:
                lost = sum(values.get(f"lost_to_{phase}", 0.0) for phase in ("saving", "validation"))
                rates[step] = (values["elapsed_seconds"] - previous[1]) * (1 - lost) / (step - previous[0])
            previous = (step, values["elapsed_seconds"]) if "elapsed_seconds" in values else previous
        median = sorted(rates.values())[len(rates) // 2] if rates else 0.0
        return [(step, rate, median) for step, rate in rates.items() if rate > _SLOW * median]

    def eval_scores(self) -> dict[tuple[str, str], dict[int, float]]:
        """Return (data, score) -> line -> score of the last model of each ``eval/*.results.json`` in the folder."""
        found = {}
        for path in sorted((self.path / "eval").glob("*.results.json")):
            answers = Path(str((read_json(path).get("models") or [{}])[-1].get("answers")))
            for row in _read_lines(path.parent / answers.name, key="scores"):
                for name, value in row["scores"].items():
                    if value is not None:
                        found.setdefault((path.name.removesuffix(".results.json"), name), {})[row["line"]] = value
        return found


def _to_float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _read_lines(path: Path, key: str = "event") -> Iterator[dict[str, Any]]:
    """Yield the objects with ``key`` of a file of JSON lines, without lines that a killed process wrote in part."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and key in record:
                yield record
