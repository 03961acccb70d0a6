"""Compare runs: what differs between them, their curves, and the scores of the same rows."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torchtune.reports._charts import Points, line_chart, smooth
from torchtune.reports._judge import Interval, duration, judge, pair, paired_interval
from torchtune.reports._page import render
from torchtune.reports._run_folder import RunFolder
from torchtune.training.metric_logging import flatten_dict
from torchtune.utils import UserError, atomic_write

# Settings that differ between any two runs and change no result.
_PATHS = ("output_dir", "checkpointer.output_dir", "metric_logger.log_dir", "profiler.output_dir")
_AXES = {"trained_tokens": "trained tokens", "elapsed_seconds": "seconds"}
_SHARES = (0.25, 0.5, 1.0)


class Comparison:
    """A comparison of two runs or more; the first is the one that others are compared with.

    Args:
        runs: the runs.

    Attributes:
        names: the shortest different ends of their paths.

    Raises:
        UserError: there are fewer than two runs, or one is given twice.
    """

    def __init__(self, runs: Sequence[RunFolder]) -> None:
        self.runs, paths = list(runs), [run.path.resolve() for run in runs]
        if len(set(paths)) != len(paths) or len(paths) < 2:
            raise UserError("compare: give two runs or more, each once.")
        depth = next(n for n in range(1, 99) if len({path.parts[-n:] for path in paths}) == len(paths))
        self.names = ["/".join(path.parts[-depth:]) for path in paths]

    def differences(self) -> list[tuple[str, list[Any]]]:
        """Return (setting, value of each run) of settings, data and code that differ; None where a run has none."""
        facts = [_facts(run) for run in self.runs]
        names = dict.fromkeys(name for one in facts for name in one)
        rows = [(name, [one.get(name) for one in facts]) for name in names]
        return [(name, values) for name, values in rows if any(value != values[0] for value in values)]

    def outcomes(self) -> list[dict[str, str]]:
        """Return verdict, steps, trained tokens, time and last losses of each run, as text."""
        return [
            {
                "verdict": judge(run).word,
                "steps": f"{run.last_step:,}",
                "trained tokens": _text(run.counted("trained_tokens"), ",.0f"),
                "time": duration(run.seconds),
                **{name: _text(_last(run, name), ".4f") for name in ("loss", "val_loss", "rewards/total")},
            }
            for run in self.runs
        ]

    @property
    def metric(self) -> str | None:
        """Metric of the curves: the reward or the loss; None if recipes or losses differ, and so their units."""
        kinds = {(run.recipe.partition("_single")[0].partition("_dist")[0], _loss(run)) for run in self.runs}
        has_rewards = all(_last(run, "rewards/total") is not None for run in self.runs)
        return "rewards/total" if has_rewards else "loss" if len(kinds) == 1 else None

    def curve(self, run: RunFolder, axis: str) -> Points:
        """Return the smoothed metric of a run over ``trained_tokens`` or ``elapsed_seconds``."""
        values = [one for one in run.steps.values() if axis in one and math.isfinite(one.get(self.metric, math.nan))]
        return smooth([(one[axis], one[self.metric]) for one in values])

    def milestones(self) -> Iterator[tuple[str, list[float]]]:
        """Yield (text, metric of each run) at a quarter, half and all of the tokens and of the time that all have."""
        for axis, label in _AXES.items() if self.metric else ():
            curves = [self.curve(run, axis) for run in self.runs]
            most = min((curve[-1][0] for curve in curves), default=0) if all(curves) else 0
            for share in _SHARES if most else ():
                at = share * most
                yield f"{at:,.4g} {label}", [[y for x, y in curve if x <= at or x == curve[0][0]][-1] for curve in curves]

    def scores(self) -> Iterator[tuple[str, int, Interval, bool | None]]:
        """Yield (name, index of a run, difference from the first run, whether higher is better) by shared rows.

        Scores are the measured loss or reward after training, and those of ``tune eval --output RUN/eval``.
        """
        first, *others = self.runs
        for index, other in enumerate(others, 1):
            mine, theirs = first.measured("after"), other.measured("after")
            if self.metric and mine and theirs and mine.get("what") == theirs.get("what"):
                pairs = pair(mine["values"], theirs["values"])
                yield from _score(f"{mine['what']} of rows of {mine['on']}", index, pairs, mine["what"] == "reward")
            scored, against = other.eval_scores(), first.eval_scores()
            for name in against.keys() & scored.keys():
                yield from _score(f"{name[1]} on {name[0]}", index, pair(against[name], scored[name]), True)

    def text(self) -> str:
        """Return the comparison for a terminal."""
        lines = _table(["", *self.names], [(name, values) for name, values in self.differences()])
        lines = ["differs", *lines] if len(lines) > 1 else ["No setting, data or code differs."]
        outcomes = self.outcomes()
        rows = [(name, [one[name] for one in outcomes]) for name in outcomes[0] if any(one[name] != "–" for one in outcomes)]
        lines += ["", "outcome", *_table(["", *self.names], rows)]
        if self.metric is None:
            lines += ["", f"The losses are not compared: {self.explain_no_metric()}."]
        elif rows := [(text, [f"{value:.4f}" for value in values]) for text, values in self.milestones()]:
            lines += ["", f"{self.metric} at the same", *_table(["", *self.names], rows)]
        lines += ["", "on the same rows, against " + self.names[0], *self.sentences()]
        return "\n".join(lines)

    def explain_no_metric(self) -> str:
        """Return why there are no curves."""
        return "the runs are of " + ", ".join(f"{run.recipe} with {_loss(run)}" for run in self.runs)

    def sentences(self) -> list[str]:
        """Return a sentence for each score."""
        found = [
            f"  {self.names[index]}: {name} {interval}, {interval.pairs} rows: {_say(interval, is_better)}"
            for name, index, interval, is_better in self.scores()
        ]
        return found or ["  no row was measured in both: the same rows of dataset_val, or tune eval --output RUN/eval"]

    def write(self, path: Path) -> None:
        """Write the comparison as one HTML file. Raises ``UserError`` if it cannot be written."""
        charts = []
        for axis, label in _AXES.items() if self.metric else ():
            curves = {name: self.curve(run, axis) for name, run in zip(self.names, self.runs, strict=True)}
            charts.append(line_chart(f"{self.metric} over {label}", curves, label))
        page = render(
            "compare.html",
            names=self.names,
            differences=self.differences(),
            outcomes=self.outcomes(),
            charts=[chart for chart in charts if chart is not None],
            sentences=self.sentences(),
            no_metric=None if self.metric else self.explain_no_metric(),
        )
        with atomic_write(path) as file:
            file.write(page.encode("utf-8", "replace"))


def _facts(run: RunFolder) -> dict[str, Any]:
    settings = {name: value for name, value in flatten_dict(run.settings).items() if name not in _PATHS}
    start = run.start
    data = {f"data: {name}": facts.get("digest") for name, facts in start.get("data", {}).items()}
    code = {f"code: {name}": value for name, value in start.get("code", {}).items()}
    return {**settings, **data, **code, "device": start.get("machine", {}).get("device"), "processes": start.get("processes")}


def _loss(run: RunFolder) -> str:
    return str((run.settings.get("loss") or {}).get("_component_", "none")).rpartition(".")[2]


def _last(run: RunFolder, name: str) -> float | None:
    return next((values[name] for values in reversed(run.steps.values()) if name in values), None)


def _text(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _score(
    name: str, index: int, pairs: Sequence[tuple[float, float]], is_better: bool
) -> Iterator[tuple[str, int, Interval, bool]]:
    finite = [after - before for before, after in pairs if math.isfinite(after)]
    if finite:
        yield name, index, paired_interval(finite), is_better


def _say(interval: Interval, higher_is_better: bool) -> str:
    if interval.is_noise:
        return "same within noise"
    return "better" if (interval.mean > 0) == higher_is_better else "worse"


def _table(head: list[str], rows: Sequence[tuple[str, Sequence[Any]]]) -> list[str]:
    """Return aligned lines; long cells are cut in the middle, where paths are alike."""
    lines = [head, *([name, *map(str, values)] for name, values in rows)]
    lines = [[cell if len(cell) <= 40 else f"{cell[:12]}…{cell[-27:]}" for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
