"""A run ends, saves and validates after the steps that its settings name."""

import pytest
import torch

from torchtune import data, supervision, training


def make_loader(num_rows=6):
    rows = [{"tokens": [n, n], "labels": [n, n]} for n in range(num_rows)]
    return data.BatchLoader(rows, batch_size=2, collate_fn=data.collate_documents, shuffle=False, seed=0)


def events(folder, *, epochs=1, loader=None, throughput=None, **settings):
    """Run all steps; returns the steps that validate, and the checkpoints by step."""
    control = supervision.RunControl(training.ParallelDims(), folder, **settings)
    loader = loader or make_loader()
    step = throughput.activity.step if throughput is not None else 0
    validations = []
    checkpoints = {}
    for _ in control.steps(loader, epochs, throughput):
        step += 1
        if control.validation_due(step):
            validations.append(step)
        name = control.checkpoint_due(step)
        if name is not None:
            checkpoints[step] = name
    return step, validations, checkpoints


@pytest.mark.parametrize(
    ("total", "interval", "steps"),
    [
        (8, 0.25, [2, 4, 6, 8]),
        (10, 0.25, [3, 5, 8, 10]),
        (9, 1 / 3, [3, 6, 9]),
        (7, 0.5, [4, 7]),
        (3, 0.1, [1, 2, 3]),
        (100, 0.3, [30, 60, 90]),
        (7, 3, [3, 6]),
        (7, "epoch", [3, 6, 7]),
        (6, "epoch", [3, 6]),
        (4, None, []),
    ],
)
def test_validation_is_due_after_steps_fractions_or_epochs(total, interval, steps, tmp_path):
    taken, validations, _ = events(tmp_path, total_steps=total, validate_every=interval)
    assert (taken, validations) == (total, steps)


@pytest.mark.parametrize(
    ("total", "interval", "checkpoints"),
    [
        (7, None, {3: "epoch_0", 6: "epoch_1", 7: "step_7"}),
        (7, "epoch", {3: "epoch_0", 6: "epoch_1", 7: "step_7"}),
        (6, None, {3: "epoch_0", 6: "epoch_1"}),
        (2, None, {2: "step_2"}),
        (7, 0.5, {4: "step_4", 7: "step_7"}),
        (7, 0.3, {3: "step_3", 5: "step_5", 7: "step_7"}),
        (7, 5, {5: "step_5", 7: "step_7"}),
    ],
)
def test_checkpoints_follow_the_interval_and_the_last_step_has_one(total, interval, checkpoints, tmp_path):
    _, _, written = events(tmp_path, total_steps=total, every_n_steps=interval)
    assert written == checkpoints


def test_run_without_a_number_of_steps_ends_after_its_epochs(tmp_path):
    assert events(tmp_path, epochs=2) == (6, [], {3: "epoch_0", 6: "epoch_1"})


@pytest.mark.parametrize(("settings", "num_left"), [({}, 3), ({"total_steps": 3}, 3), ({"total_steps": 5}, 1)])
def test_loader_goes_on_after_a_finished_run(settings, num_left, tmp_path):
    loader = make_loader()
    events(tmp_path, loader=loader, **settings)
    assert len(list(loader)) == num_left


def test_resumed_run_that_has_all_its_steps_takes_no_other(tmp_path):
    dims = training.ParallelDims()
    throughput = supervision.Throughput(dims=dims, device=torch.device("cpu"), step=5)
    loader = make_loader()
    loader.load_state_dict({**loader.state_dict(), "epoch": 1, "step": 2})
    assert events(tmp_path, loader=loader, throughput=throughput, total_steps=5) == (5, [], {})


def test_intervals_are_described():
    intervals = [None, "epoch", 50, 0.25]
    described = [supervision.describe_interval(interval) for interval in intervals]
    assert described == ["epoch", "epoch", "50 steps", "0.25 of the run"]


@pytest.mark.parametrize(
    ("plan", "steps", "epochs", "text"),
    [
        ({"epochs": 3}, 30, 3, "30 = 3 epochs of 10"),
        ({"epochs": 3, "max_steps": 25}, 25, 3, "25 (max_steps), of 10 per epoch"),
        ({"epochs": 1, "max_steps": 30}, 30, 3, "30 (max_steps), of 10 per epoch"),
    ],
)
def test_plan_counts_the_steps_and_epochs_of_max_steps(plan, steps, epochs, text):
    plan = supervision.StepPlan(**plan)
    assert (plan.count_steps(10), plan.count_epochs(10)) == (steps, epochs)
    assert plan.describe_steps(10) == text


def test_fraction_of_the_run_always_validates():
    settings = {"dataset_val": {"_component_": "a.b"}, "keep_best": "val_loss"}
    for interval in (0.5, "epoch", 2):
        assert supervision.explain_no_validation({**settings, "run_val_every_n_steps": interval}, steps=2) is None


def save_steps(folder, *, save_seconds, num_steps, **settings):
    """Take steps of a second each, with checkpoints that take some seconds; returns the steps that were saved."""
    now = 0.0
    control = supervision.RunControl(training.ParallelDims(), folder, clock=lambda: now, **settings)
    saved = []
    for step, _ in enumerate(control.steps(make_loader(2 * num_steps), epochs=1), start=1):
        now += 1
        name = control.checkpoint_due(step)
        if name is not None:
            (folder / name).mkdir()
            now += save_seconds
            (folder / name / ".complete").touch()
            saved.append(step)
    return saved


def test_checkpoint_that_outlasts_the_grace_period_shortens_the_interval(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TORCHTUNE_GRACE", "5")
    saved = save_steps(tmp_path, save_seconds=7, num_steps=250, every_n_minutes=1.5)
    # One and a half minutes to the first, which takes 7 s, and 8 s with a step. Then ten times as long, 7 s of saving
    # included.
    assert saved == [90, 90 + 73, 90 + 73 + 73, 250]
    assert caplog.text.count("more than the 5 s between the signal and the kill (--grace)") == 1
    assert "A checkpoint and a step take 8 s" in caplog.text
    assert "so one is written every 1.33 minutes" in caplog.text


@pytest.mark.parametrize(("grace", "minutes"), [("60", 1.5), ("5", 0.5), (None, 1.5)])
def test_interval_is_kept_if_checkpoints_are_fast_or_frequent(grace, minutes, tmp_path, monkeypatch, caplog):
    if grace is not None:
        monkeypatch.setenv("TORCHTUNE_GRACE", grace)
    saved = save_steps(tmp_path, save_seconds=7, num_steps=200, every_n_minutes=minutes)
    assert saved[0] == 60 * minutes
    assert saved[1] - saved[0] in (60 * minutes, 60 * minutes - 7)
    assert ("save_every_n_minutes writes one every 0.5 minutes" in caplog.text) == (grace == "5")
