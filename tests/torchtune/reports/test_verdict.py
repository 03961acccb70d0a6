"""The verdict on a run, and the interval that it rests on."""

import math

import numpy as np
import pytest

from tests.torchtune.reports.folders import ROWS, START, ended, lines, measured, write_best, write_run
from torchtune.reports import RunFolder, judge, paired_interval

# Two-sided 95 % quantiles of Student's t, from the table of Fisher and Yates.
STUDENT = {4: 2.776, 7: 2.365, 15: 2.131, 31: 2.040}


@pytest.mark.parametrize("degrees", STUDENT)
def test_interval_of_normal_differences_is_near_students_t(degrees):
    """Bootstrap means of n rows have the variance s² (n - 1) / n², which the expansion undoes."""
    values = np.random.default_rng(degrees).normal(1.0, 2.0, degrees + 1)
    half = STUDENT[degrees] * values.std(ddof=1) / math.sqrt(len(values))
    interval = paired_interval(values)
    assert interval.mean == pytest.approx(values.mean())
    assert (interval.high - interval.low) / 2 == pytest.approx(half, rel=0.25 if degrees < 10 else 0.12)


def test_interval_covers_the_mean_in_95_percent_of_samples():
    generator = np.random.default_rng(0)
    intervals = [paired_interval(generator.normal(0.0, 1.0, 10)) for _ in range(150)]
    assert 0.9 <= np.mean([interval.is_noise for interval in intervals]) <= 0.99


def test_no_global_generator_is_used_and_few_rows_decide_nothing():
    np.random.seed(3)
    before = np.random.get_state()[1].copy()
    assert paired_interval([-1.0] * 6) == paired_interval([-1.0] * 6)
    assert not paired_interval([-1.0] * 5).is_noise
    assert paired_interval([-1.0] * 4).is_noise
    assert (np.random.get_state()[1] == before).all()


LOWER = {name: value - 0.5 - 0.01 * i for i, (name, value) in enumerate(ROWS.items())}
MIXED = {name: value + (-1) ** i * 0.3 for i, (name, value) in enumerate(ROWS.items())}
HIGHER = {name: value + 0.5 for name, value in ROWS.items()}


@pytest.mark.parametrize(
    ("after", "what", "word"),
    [
        (LOWER, "loss", "learned"),
        (MIXED, "loss", "same within noise"),
        (HIGHER, "loss", "diverged"),
        (HIGHER, "reward", "learned"),
        (LOWER, "reward", "diverged"),
        (LOWER | {"row3": None}, "loss", "diverged"),  # not finite
        ({"another": 1.0}, "loss", "unfinished"),
    ],
)
def test_verdict_follows_the_measured_rows(after, what, word, tmp_path):
    events = [START, measured("before", ROWS, what=what), measured("after", after, what=what), ended()]
    verdict = judge(RunFolder(write_run(tmp_path / "run", events)))
    assert verdict.word == word
    if verdict.interval is not None:
        assert f"{verdict.interval.pairs} rows of dataset_val 2.35 → " in str(verdict)


def test_the_best_checkpoint_is_judged_even_if_the_run_has_diverged_after_it(tmp_path):
    folder = write_run(tmp_path / "run", [], [{"step": 20, "loss": None}])
    best = write_best(folder, 8, 1.5, "max:val_accuracy")
    events = [START, measured("before", ROWS), measured("after", LOWER, best=best), ended()]
    (folder / "logs" / "run.jsonl").write_text(lines(events))
    verdict = judge(RunFolder(folder))
    assert verdict.word == "learned"
    assert " of step_8, with the best val_accuracy, 1.5 at step 8, " in verdict.reason


def test_verdict_says_that_the_last_weights_were_measured_instead_of_the_best(tmp_path):
    """Of runs of earlier releases, and where the best checkpoint could not be loaded."""
    folder = write_run(tmp_path / "run", [START, measured("before", ROWS), measured("after", HIGHER), ended()])
    write_best(folder, 8, 1.5)
    assert (
        " of the last weights, not of step_8, with the best val_loss, 1.5 at step 8, "
        in judge(RunFolder(folder)).reason
    )


@pytest.mark.parametrize(
    ("events", "metrics", "word"),
    [
        ([ended(changed=False)], [{"step": 20, "loss": 1.0}], "nothing trained"),
        ([ended("was stopped", 7)], [{"step": 7, "loss": 1.0}], "unfinished"),
        ([ended("has failed", 7, error="SkippedStepsError")], [{"step": 7, "loss": 1.0}], "diverged"),
        ([], [{"step": 6, "loss": 1.0}, {"step": 7, "loss": None}], "diverged"),
    ],
)
def test_verdict_without_a_second_measurement_follows_the_end_of_the_run(events, metrics, word, tmp_path):
    run = RunFolder(write_run(tmp_path / "run", [START, measured("before", ROWS), *events], metrics))
    assert judge(run).word == word
