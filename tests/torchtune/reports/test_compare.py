"""Runs compared with the first of them: at the tokens and seconds that all have reached, and on the same rows."""

import pytest

from tests.torchtune.reports.folders import ROWS, START, ended, measured, write_run
from torchtune.reports import Comparison, RunFolder
from torchtune.utils import UserError


def write_trained_run(folder, steps, value, after, **settings):
    """Write a run with a constant loss; a step has ten trained tokens and takes two seconds."""
    metrics = []
    for step in range(1, steps + 1):
        counters = {"processed_tokens": 20 * step, "trained_tokens": 10 * step, "elapsed_seconds": 2.0 * step}
        metrics.append({"step": step, "loss": value, **counters})
    events = [START, measured("before", ROWS), measured("after", after), ended(step=steps)]
    return RunFolder(write_run(folder, events, metrics, **settings))


def test_runs_are_compared_where_all_have_been(tmp_path):
    short = write_trained_run(tmp_path / "short", 4, 2.0, ROWS)
    long = write_trained_run(tmp_path / "long", 12, 1.0, {name: value - 1 for name, value in ROWS.items()})
    comparison = Comparison([short, long])
    assert comparison.names == ["short", "long"]
    assert dict(comparison.milestones) == {
        "20 trained tokens": [2.0, 1.0],
        "40 trained tokens": [2.0, 1.0],
        "4 seconds": [2.0, 1.0],
        "8 seconds": [2.0, 1.0],
    }
    ((run, score, interval, meaning),) = comparison.scores
    assert (run, score, interval.mean, interval.pairs, meaning) == ("long", "loss after training", -1.0, 8, "better")


def test_settings_that_change_a_result_are_named(tmp_path):
    first = write_trained_run(tmp_path / "a", 1, 1.0, ROWS, lr=0.1, output_dir="/tmp/a", seed=1)
    second = write_trained_run(tmp_path / "b", 1, 1.0, ROWS, lr=0.2, output_dir="/tmp/b", seed=1)
    assert Comparison([first, second]).differences == {"lr": [0.1, 0.2]}


def test_losses_of_different_kinds_are_not_compared(tmp_path):
    loss = {"_component_": "torchtune.rlhf.loss.DPOLoss"}
    comparison = Comparison(
        [write_trained_run(tmp_path / "a", 2, 1.0, ROWS), write_trained_run(tmp_path / "b", 2, 1.0, ROWS, loss=loss)]
    )
    assert comparison.metric is None
    assert [*comparison.milestones, *comparison.scores] == []
    assert "their units differ: lora_finetune_single_device with LinearCrossEntropyLoss" in comparison.text()


def test_one_run_is_no_comparison(tmp_path):
    run = write_trained_run(tmp_path / "a", 1, 1.0, ROWS)
    for runs in ([run], [run, run]):
        with pytest.raises(UserError, match="give two runs or more, each once"):
            Comparison(runs)
