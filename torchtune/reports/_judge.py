"""Did the run learn: paired values before and after training, with an interval."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from torchtune.reports._run_folder import RunFolder

_RESAMPLES = 2000
# Errors that mean that the loss is no number any more.
_DIVERGED = ("SkippedStepsError",)


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

    def __str__(self) -> str:
        return f"{self.mean:+.4g} (95 % interval {self.low:+.4g} to {self.high:+.4g})"


@dataclass(frozen=True)
class Verdict:
    """The verdict on a run.

    Attributes:
        word: ``learned``, ``same within noise``, ``diverged``, ``nothing trained``, or ``unfinished``.
        reason: one sentence with the numbers.
        interval: difference of the measured rows, if there are pairs.

    Example:
        >>> print(torchtune.reports.Verdict("learned", "the loss of 8 rows fell"))
        learned: the loss of 8 rows fell
    """

    word: str
    reason: str
    interval: Interval | None = None

    def __str__(self) -> str:
        return f"{self.word}: {self.reason}"


def paired_interval(differences: Sequence[float]) -> Interval:
    """Return the paired bootstrap interval of a mean difference: the expanded percentile interval.

    The differences are resampled, not the two samples (Efron and Tibshirani, An Introduction to the Bootstrap, 1993).
    The percentiles are those of section 5.3 of Hesterberg, "What Teachers Should Know About the Bootstrap" (The American
    Statistician 69, 2015), Φ(±t √(n / (n − 1))) with Student's t for n − 1 degrees of freedom, which corrects the
    narrowness of few rows. The seed is fixed, and the global generators stay as they are.

    Args:
        differences: at least one; after minus before, for each row.

    Example:
        >>> torchtune.reports.paired_interval([-0.5, -0.4, -0.6, -0.5]).is_noise
        False
    """
    values, rng = np.asarray(differences, dtype=np.float64), np.random.Generator(np.random.PCG64(0))
    count, mean = len(values), float(np.mean(values))
    if count < 2:
        return Interval(mean, -math.inf, math.inf, count)
    means = [values[rng.integers(0, count, count)].mean() for _ in range(_RESAMPLES)]
    share = NormalDist().cdf(-_student_t(count - 1) * math.sqrt(count / (count - 1)))
    low, high = np.quantile(means, [share, 1 - share])
    return Interval(mean, float(low), float(high), count)


def _student_t(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t (Abramowitz and Stegun 26.7.5; exact for one degree)."""
    if degrees == 1:
        return math.tan(0.475 * math.pi)
    z = NormalDist().inv_cdf(0.975)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, 1))


def pair(before: Mapping[Any, float | None], after: Mapping[Any, float | None]) -> list[tuple[float, float]]:
    """Return the (before, after) values of the rows that both have; a value that is not finite is NaN."""
    both = ((before[row], after[row]) for row in before if row in after and before[row] is not None)
    return [(one, math.nan if other is None else other) for one, other in both]


def judge(run: RunFolder) -> Verdict:
    """Return the verdict on a run, from the values of the same rows before and after training.

    Losses must fall and rewards rise by an interval without 0 to have *learned*. A run has *diverged* if they move the
    other way, or are not finite. The verdict is *nothing trained* if no bit of a trained parameter has changed.

    Example:
        >>> torchtune.reports.judge(torchtune.reports.RunFolder("/tmp/run")).word  # doctest: +SKIP
        'learned'
    """
    ends = [event for event in run.events if event["event"] == "end"]
    if run.end is not None and run.end.get("error") in _DIVERGED:
        return Verdict("diverged", str(run.end["sentence"]).rstrip("."))
    losses = [(step, values["loss"]) for step, values in run.steps.items() if "loss" in values]
    if losses and not math.isfinite(losses[-1][1]):
        return Verdict("diverged", f"the loss of step {losses[-1][0]:,} is not finite")
    if run.end is not None and run.last_step and all(end.get("changed") is False for end in ends):
        return Verdict("nothing trained", f"no trained parameter has changed in {run.last_step:,} steps")
    before, after = run.measured("before"), run.measured("after")
    if run.state not in ("finished", "stopped early") or after is None:
        return Verdict("unfinished", _progress(run, losses))
    pairs = [] if before is None else pair(before["values"], after["values"])
    if not pairs:
        return Verdict("unfinished", f"no rows were measured before and after; {_progress(run, losses)}")
    if any(math.isnan(value) for _, value in pairs):
        return Verdict("diverged", f"the {after['what']} of measured rows is not finite")
    interval = paired_interval([new - old for old, new in pairs])
    means = [math.fsum(column) / len(pairs) for column in zip(*pairs, strict=True)]
    rows = f"{len(pairs)} rows of {after['on']}"
    reason = f"{after['what']} of {rows} {means[0]:.4g} → {means[1]:.4g}, {interval}"
    if interval.is_noise:
        return Verdict("same within noise", reason, interval)
    is_better = (interval.mean > 0) == (after["what"] == "reward")
    return Verdict("learned" if is_better else "diverged", reason, interval)


def _progress(run: RunFolder, losses: list[tuple[int, float]]) -> str:
    total = run.start.get("total_steps")
    at = f"at step {run.last_step:,}{f' of {total:,}' if total else ''}"
    text = {
        "running": f"the run is going on, {at}",
        "killed": f"the run was killed, or is going on elsewhere, {at}",
        "failed": f"the run failed {at}",
        "stopped": f"the run was stopped {at}",
    }.get(run.state, f"the run ended {at}")
    if len(losses) > 1:
        text += f"; the loss went from {losses[0][1]:.4g} to {losses[-1][1]:.4g}"
    return text


def duration(seconds: float) -> str:
    """Return text such as ``2 h 5 min``."""
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds:.0f} s" if minutes else f"{seconds:.1f} s"
