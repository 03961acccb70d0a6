"""Verdict on a run, from paired values before and after training and a confidence interval."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import Any

import numpy as np

from torchtune.reports._run_folder import RunFolder, describe_best

_RESAMPLES = 2000
_FEWEST_PAIRS = 5


@dataclass(frozen=True)
class Interval:
    """Mean of paired differences, and its 95 % confidence interval.

    Attributes:
        mean: mean difference.
        low: lower bound.
        high: upper bound.
        pairs: number of pairs.

    Example:
        >>> torchtune.reports.Interval(-0.5, -0.6, -0.4, pairs=8).is_noise
        False
    """

    mean: float
    low: float
    high: float
    pairs: int

    @property
    def is_noise(self) -> bool:
        """Whether the interval includes 0."""
        return self.low <= 0 <= self.high

    def meaning(self, *, less_is_better: bool) -> str:
        """Return ``better``, ``worse`` or ``same within noise``, for differences of later values from earlier ones."""
        if self.is_noise:
            return "same within noise"
        has_fallen = self.mean < 0
        return "better" if has_fallen == less_is_better else "worse"

    def __str__(self) -> str:
        return f"{self.mean:+.4g} (95 % interval {self.low:+.4g} to {self.high:+.4g})"


@dataclass(frozen=True)
class Verdict:
    """The verdict on a run.

    Attributes:
        word: ``learned``, ``same within noise``, ``diverged``, ``nothing trained``, or ``unfinished``.
        reason: numbers that support the verdict.
        interval: interval of the differences of the measured rows, if there are pairs.

    Example:
        >>> print(torchtune.reports.Verdict("learned", "loss of 8 rows 2 → 1"))
        learned: loss of 8 rows 2 → 1
    """

    word: str
    reason: str
    interval: Interval | None = None

    def __str__(self) -> str:
        return f"{self.word}: {self.reason}"


def paired_interval(differences: Sequence[float]) -> Interval:
    """Return the mean of differences with its paired bootstrap interval.

    The differences of rows are resampled, not the two samples (Efron and Tibshirani, An Introduction to the Bootstrap,
    1993). The percentiles are expanded to Φ(±t √(n / (n − 1))), with Student's t of n − 1 degrees of freedom: plain
    percentiles are too narrow for few rows (Hesterberg, "What Teachers Should Know About the Bootstrap", The American
    Statistician 69, 2015). t is the expansion 26.7.5 of Abramowitz and Stegun, within 1 % here. The seed is fixed, and
    the global generators are not used. Fewer than five differences have an infinite interval.

    Args:
        differences: at least one; after minus before, for each row.

    Example:
        >>> torchtune.reports.paired_interval([-0.5, -0.4, -0.6, -0.5, -0.5]).is_noise
        False
    """
    values = np.asarray(differences, dtype=np.float64)
    count = len(values)
    if count < _FEWEST_PAIRS:
        return Interval(float(values.mean()), -math.inf, math.inf, count)
    generator = np.random.default_rng(0)
    rows = generator.integers(0, count, (_RESAMPLES, count))  # [resamples, n], drawn with replacement
    means = values[rows].mean(axis=1)
    t = 1.95996 + 2.37227 / (count - 1) + 2.82250 / (count - 1) ** 2  # of the two-sided 95 %
    tail = NormalDist().cdf(-t * math.sqrt(count / (count - 1)))
    low, high = np.quantile(means, [tail, 1 - tail]).tolist()
    return Interval(float(values.mean()), low, high, count)


def pair(before: Mapping[Any, float | None], after: Mapping[Any, float | None]) -> list[tuple[float, float]]:
    """Return the (before, after) values of the rows in both mappings; an ``after`` that is not finite is NaN."""
    pairs = []
    for row, old in before.items():
        if old is None or row not in after:
            continue
        new = after[row]
        if new is None:  # JSON has no NaN
            new = math.nan
        pairs.append((old, new))
    return pairs


def compare_rows(before: Mapping[Any, float | None], after: Mapping[Any, float | None]) -> Interval | None:
    """Return the interval of after minus before, over the rows with both values; None if there are none."""
    differences = [new - old for old, new in pair(before, after) if math.isfinite(new - old)]
    if not differences:
        return None
    return paired_interval(differences)


def judge(run: RunFolder) -> Verdict:
    """Return the verdict on a run, from the values of the same rows before and after training.

    The values after training are those of the weights that other commands use: of the best checkpoint with
    ``keep_best``, otherwise the last ones.

    *Learned*: losses fell, or rewards rose, and the interval excludes 0. *Diverged*: losses rose, or rewards fell, and
    the interval excludes 0; or the values are not finite, or too many steps were skipped. *Nothing trained*: no bit of
    a trained parameter changed.

    Example:
        >>> torchtune.reports.judge(torchtune.reports.RunFolder("/tmp/run")).word  # doctest: +SKIP
        'learned'
    """
    after = {}
    if run.end:  # else a measurement is that of an earlier process
        after = run.measured("after")
    losses = run.curve("loss")
    last_loss_is_bad = bool(losses) and not math.isfinite(losses[-1][1])
    # A run that has diverged after its best checkpoint is judged by that.
    if run.end.get("error") == "SkippedStepsError" or (last_loss_is_bad and "best" not in after):
        return Verdict("diverged", _describe_progress(run, losses))
    # A run that was resumed has several ends: nothing was trained if no process changed a parameter.
    ends = [event for event in run.events if event["event"] == "end"]
    if ends and run.last_step and all(end.get("changed") is False for end in ends):
        return Verdict("nothing trained", f"no trained parameter has changed in {run.last_step:,} steps")
    values_before = run.measured("before").get("values", {})
    values_after = after.get("values", {})
    pairs = pair(values_before, values_after)
    if not pairs:
        count = len(values_before) or "no"
        progress = _describe_progress(run, losses)
        return Verdict("unfinished", f"{progress}; {count} rows were measured before training, none of them after it")
    old = fmean(old for old, _ in pairs)
    new = fmean(new for _, new in pairs)
    reason = f"{after['what']} of {len(pairs)} rows of {after['on']} {old:.4g} → {new:.4g}"
    if "best" in after:
        reason += f" of {describe_best(after['best'])}"
    elif run.best is not None:
        reason += f" of the last weights, not of {describe_best(run.best)}"
    if math.isnan(new):  # the value of a row after training is not finite
        return Verdict("diverged", reason)
    interval = compare_rows(values_before, values_after)
    meaning = interval.meaning(less_is_better=after["what"] != "reward")
    word = {"better": "learned", "worse": "diverged"}.get(meaning, meaning)  # or "same within noise"
    return Verdict(word, f"{reason}, {interval}", interval)


def _describe_progress(run: RunFolder, losses: Sequence[tuple[int, float]]) -> str:
    """Return how far the run got, and its first and last loss."""
    text = f"the run {run.state} at step {run.last_step:,}"
    total = run.start.get("total_steps")
    if total:
        text += f" of {total:,}"
    if losses:
        text += f"; the loss went from {losses[0][1]:.4g} to {losses[-1][1]:.4g}"
    return text
