"""The folder of a run, as it is left by runs that end, resume, are killed or go on."""

import json
import math
import os
import platform
from pathlib import Path

import pytest

from tests.torchtune.reports.folders import SETTINGS, START, ended, lines, measured, write_run
from torchtune.reports import RunFolder, judge
from torchtune.utils import UserError


def counted(step, tokens, seconds, **more):
    return {"step": step, "processed_tokens": 2 * tokens, "trained_tokens": tokens, "elapsed_seconds": seconds, **more}


def test_a_resumed_run_is_one_run(tmp_path):
    """The second process repeats step 3, which the first did not save."""
    first = [counted(step, 10 * step, 2.0 * step, loss=9.0) for step in (1, 2, 3)]
    second = [counted(step, 10 * (step - 2), 1.0 * (step - 2), loss=5.0) for step in (3, 4)]
    events = [START, START | {"step": 2, "time": 300.0}, ended(step=4)]
    run = RunFolder(write_run(tmp_path / "run", events, [*first, {"step": 2, "val_loss": 7.0}, *second]))
    assert run.curve("loss") == [(1, 9.0), (2, 9.0), (3, 5.0), (4, 5.0)]
    assert run.curve("trained_tokens") == [(1, 10), (2, 20), (3, 30), (4, 40)]
    assert run.curve("elapsed_seconds") == [(1, 2), (2, 4), (3, 5), (4, 6)]
    assert run.steps[2]["val_loss"] == 7.0
    assert run.last("processed_tokens") == 80


def test_text_log_is_read_with_nan_and_without_a_cut_line(tmp_path):
    run = write_run(tmp_path / "run", [START])
    (run / "logs" / "log.jsonl").unlink()
    logger = SETTINGS["metric_logger"] | {"output_fmt": "txt"}
    (run / "torchtune_config.yaml").write_text(json.dumps(SETTINGS | {"metric_logger": logger}))
    text = "Step 1 | loss:1.5 lr:2e-05 loss/my data:0.25\nStep 2 | loss:nan\nStep 3 | loss:0."
    (run / "logs" / "log.txt").write_text(text)
    steps = RunFolder(run).steps
    assert steps[1] == {"loss": 1.5, "lr": 2e-05, "loss/my data": 0.25}
    assert math.isnan(steps[2]["loss"])
    assert 3 not in steps, "the last line was not completely written"


def test_cut_last_line_of_a_log_is_left_out(tmp_path):
    run = write_run(tmp_path / "run", [START], [{"step": 1, "loss": 2.0}])
    for name in ("logs/run.jsonl", "logs/log.jsonl", "skipped_steps.jsonl"):
        with (run / name).open("a") as file:
            file.write('{"event": "end", "step": 2, "los')
    folder = RunFolder(run)
    assert (list(folder.steps), len(folder.events), folder.skipped_steps) == ([1], 1, [])


@pytest.mark.parametrize("output_fmt", ["jsonl", "txt"])
def test_newest_step_is_read_from_the_end_of_a_long_log(output_fmt, tmp_path, monkeypatch):
    """The log is longer than the part that is read, which begins within a line, and its last line is cut."""
    run = write_run(tmp_path / "run", [START])
    text = {
        "jsonl": lines([{"step": step, "loss": 2.0} for step in range(3000)]) + '{"step": 5000, "lo',
        "txt": "".join(f"Step {step} | loss:2.0 lr:0.001\n" for step in range(3000)) + "Step 5000 | loss:2",
    }
    logger = SETTINGS["metric_logger"] | {"output_fmt": output_fmt, "filename": "log"}
    (run / "torchtune_config.yaml").write_text(json.dumps(SETTINGS | {"metric_logger": logger}))
    (run / "logs" / "log").write_text(text[output_fmt])
    folder = RunFolder(run)
    monkeypatch.setattr(Path, "read_text", None)  # reads a whole file
    assert folder.newest_step == 2999


def test_killed_run_is_distinguished_from_a_running_one(tmp_path):
    run = write_run(tmp_path / "run", [START], [{"step": 5, "loss": 2.0}])
    assert RunFolder(run).state == "was killed"
    assert str(judge(RunFolder(run))).startswith("unfinished: the run was killed at step 5 of 20")
    (run / ".run.lock").write_text(json.dumps({"host": platform.node(), "pid": os.getpid()}))
    assert RunFolder(run).state == "is going on"
    (run / ".run.lock").write_text(json.dumps({"host": platform.node(), "pid": 2**22 + 1}))
    assert RunFolder(run).state == "was killed"


def test_a_resumed_run_that_was_killed_has_not_ended(tmp_path):
    """Its earlier process has ended, and this one has not."""
    events = [START, ended("was stopped", step=4), START | {"step": 4}]
    run = RunFolder(write_run(tmp_path / "run", events))
    assert (run.end, run.state) == ({}, "was killed")


def test_only_the_newest_run_of_a_folder_counts(tmp_path):
    events = [START, measured("before", {"a": 1.0}), ended(), START | {"time": 900.0}]
    run = RunFolder(write_run(tmp_path / "run", events))
    assert run.measured("before") == {}
    assert run.start["time"] == 900.0


def test_slow_steps_exclude_saves_and_validation(tmp_path):
    seconds = [1, 2, 3, 4, 9, 10, 15, 16]
    metrics = [counted(step, step, float(at), loss=1.0) for step, at in enumerate(seconds, 1)]
    metrics[6]["lost_to_saving"] = 0.8
    slow_steps = RunFolder(write_run(tmp_path / "run", [START], metrics)).slow_steps()
    assert slow_steps == [(5, 5.0, 1.0)]


@pytest.mark.parametrize("content", [None, "{", "- 1\n", "5"])
def test_folder_without_settings_is_refused(content, tmp_path):
    if content is not None:
        (tmp_path / "torchtune_config.yaml").write_text(content)
    with pytest.raises(UserError, match=r"torchtune_config.yaml: give the output_dir of a run\.$"):
        RunFolder(tmp_path)


def test_checkpoint_folder_gives_its_run(tmp_path):
    run = write_run(tmp_path / "run", [START])
    (run / "epoch_0").mkdir()
    (run / "epoch_0" / ".complete").write_text("{}")
    assert RunFolder(run / "epoch_0").path == run


def test_evaluation_scores_are_read_by_line(tmp_path):
    run = write_run(tmp_path / "run", [START])
    (run / "eval").mkdir()
    answers = [{"line": 1, "scores": {"exact": 1.0}}, {"line": 2, "scores": {"exact": None}}]
    (run / "eval" / "rows.run.jsonl").write_text(lines(answers))
    (run / "eval" / "rows.results.json").write_text(json.dumps({"models": [{"answers": "eval/rows.run.jsonl"}]}))
    assert RunFolder(run).eval_scores() == {"exact on rows": {1: 1.0}}
