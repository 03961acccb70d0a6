"""Compare runs: their settings, their curves, and their scores on the same rows."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torchtune.reports._page import Points, environment, line_chart, smooth, write_page
from torchtune.reports._run_folder import RunFolder
from torchtune.reports._verdict import Interval, compare_rows, judge
from torchtune.training.metric_logging import flatten_dict
from torchtune.utils import UserError

# Settings that differ between any two runs and change no result.
_PATHS = ("output_dir", "checkpointer.output_dir", "metric_logger.log_dir", "profiler.output_dir")
_AXES = {"trained_tokens": "trained tokens", "elapsed_seconds": "seconds"}


class Comparison:
    """Comparison of runs with the first of them.

    Args:
        runs: two runs or more.

    Attributes:
        names: shortest distinct suffixes of the runs' paths.
        verdicts: verdict on each run.

    Raises:
        UserError: there are fewer than two runs, or a run occurs twice.

    Example:
        >>> runs = [torchtune.reports.RunFolder(path) for path in ("/tmp/a", "/tmp/b")]  # doctest: +SKIP
        >>> print(torchtune.reports.Comparison(runs).text())  # doctest: +SKIP
    """

    def __init__(self, runs: Sequence[RunFolder]) -> None:
        paths = [run.path.resolve() for run in runs]
        if len(set(paths)) != len(paths) or len(paths) < 2:
            raise UserError("compare: give two runs or more, each once.")
        self.runs = list(runs)
        self.names = _shortest_names(paths)
        self.verdicts = [judge(run) for run in runs]

    @property
    def differences(self) -> dict[str, list[Any]]:
        """Setting, data or code that differs -> its value in each run, None if the run lacks it."""
        facts = [_facts(run) for run in self.runs]
        names: dict[str, None] = {}  # in the order of the files
        for facts_of_run in facts:
            names |= dict.fromkeys(facts_of_run)
        differences = {}
        for name in names:
            values = [facts_of_run.get(name) for facts_of_run in facts]
            if any(value != values[0] for value in values):
                differences[name] = values
        return differences

    @property
    def metric(self) -> str | None:
        """The metric of the curves: reward or loss; None if losses of different methods have different units."""
        if all(run.last("rewards/total") is not None for run in self.runs):
            return "rewards/total"
        loss_classes = {_loss_class(run) for run in self.runs}
        if len(loss_classes) > 1:
            return None
        return "loss"

    @property
    def drawn_metrics(self) -> list[str]:
        """The metric of the curves, and its value on validation data if all runs have validated."""
        if self.metric is None:
            return []
        metrics = [self.metric]
        if all(run.curve(f"val_{self.metric}") for run in self.runs):
            metrics.append(f"val_{self.metric}")
        return metrics

    def curve(self, run: RunFolder, axis: str, metric: str) -> Points:
        """Return a smoothed metric of a run over ``trained_tokens`` or ``elapsed_seconds``."""
        points: list[tuple[float, float]] = []
        position: float | None = None
        for values in run.steps.values():
            position = values.get(axis, position)  # a validation may follow a step without other metrics
            if position is not None and metric in values:
                points.append((position, values[metric]))
        return smooth(points)

    @property
    def milestones(self) -> Iterator[tuple[str, list[float]]]:
        """Yield (text, metric of each run) at half and at all of the tokens, and of the time, that all runs reached."""
        if self.metric is None:
            return
        for axis, label in _AXES.items():
            curves = [self.curve(run, axis, self.metric) for run in self.runs]
            if not all(curves):
                continue
            reached = min(curve[-1][0] for curve in curves)
            for position in (reached / 2, reached):
                values = [_height_at(position, curve) for curve in curves]
                yield f"{position:,.4g} {label}", values

    @property
    def scores(self) -> Iterator[tuple[str, str, Interval, str]]:
        """Yield (run, score, difference from the first run, meaning) over the rows on which both were measured.

        Scores are the measured loss or reward after training, and the results of ``tune eval --output RUN/eval``.
        """
        if self.metric is None:
            return
        first_scores = _scores(self.runs[0])
        for run_name, run in zip(self.names[1:], self.runs[1:], strict=True):
            scores = _scores(run)
            for name in first_scores.keys() & scores.keys():
                interval = compare_rows(first_scores[name], scores[name])
                if interval is not None:
                    yield run_name, name, interval, interval.meaning(less_is_better=name == "loss after training")

    @property
    def best_values(self) -> list[str]:
        """Value and step of each run's best checkpoint, which other commands use; empty if no run keeps one."""
        if all(run.best is None for run in self.runs):
            return []
        texts = []
        for run in self.runs:
            if run.best is None:
                texts.append("none")
            else:
                texts.append(f"{run.best['value']:.5g} at step {run.best['step']:,}")
        return texts

    @property
    def losses(self) -> str:
        """The recipe and loss of each run."""
        return ", ".join(f"{run.recipe} with {_loss_class(run)}" for run in self.runs)

    def text(self) -> str:
        """Return the comparison for a terminal."""
        text = environment(autoescape=False).get_template("compare.txt").render(comparison=self)
        return "\n".join(line.rstrip() for line in text.rstrip().splitlines())

    def write(self, path: Path) -> None:
        """Write the comparison as one HTML file. Raises ``UserError`` if it cannot be written."""
        charts = []
        for metric in self.drawn_metrics:
            for axis, label in _AXES.items():
                curves = {}
                for name, run in zip(self.names, self.runs, strict=True):
                    curves[name] = self.curve(run, axis, metric)
                chart = line_chart(f"{metric} over {label}", curves, label)
                if chart["lines"]:
                    charts.append(chart)
        write_page("compare.html", path, comparison=self, charts=charts)


def _shortest_names(paths: Sequence[Path]) -> list[str]:
    """Return the ends of different paths, with as many folders as are needed to tell them apart."""
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    return ["/".join(path.parts[-depth:]) for path in paths]


def _height_at(position: float, curve: Points) -> float:
    """Return the last value of a curve at or before a position; NaN before its first point."""
    height = math.nan
    for x, y in curve:
        if x <= position:
            height = y
    return height


def _facts(run: RunFolder) -> dict[str, Any]:
    """Return settings, code, machine and digests of the data of a run, by dotted name."""
    facts = flatten_dict(run.settings)
    for name in _PATHS:
        facts.pop(name, None)
    for name in ("code", "processes", "device"):
        facts[name] = run.start.get(name)
    described_data = run.start.get("data", {})  # by setting
    facts["data"] = {name: data.get("digest") for name, data in described_data.items()}
    return flatten_dict(facts)


def _loss_class(run: RunFolder) -> str:
    """Return the class name of a run's loss; ``None`` as text if the settings name none."""
    loss = run.settings.get("loss") or {}
    return str(loss.get("_component_")).rpartition(".")[2]


def _scores(run: RunFolder) -> dict[str, dict[Any, float]]:
    """Return name of a score -> (row -> score), of the measurement after training and of evaluations."""
    after = run.measured("after")
    name = f"{after.get('what')} after training"
    return {name: after.get("values", {}), **run.eval_scores()}
