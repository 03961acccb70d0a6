"""The best checkpoint is kept, and a run ends when validation gets no better."""

import json
import math
import shutil
from statistics import fmean

import pytest
from torch.optim.lr_scheduler import LambdaLR

from tests.recipes.runs import load_recipe, read_log, run_main, start, write_config
from torchtune.config import ConfigError, load_and_check
from torchtune.reports import RunFolder, judge
from torchtune.supervision._best_validation import BestValidation, ValidationMetricError

NAME = "lora_finetune_single_device"
PATIENCE = 3
SETTINGS = {
    "dataset_val": "${dataset}",
    "run_val_every_n_steps": 1,
    "lr_scheduler": {"_component_": "tests.recipes.test_best_validation.there_and_back"},
}


def there_and_back(optimizer, last_epoch=-1, **_):
    """The loss falls for five steps. Then the rate is below zero and the loss rises, on every machine."""
    return LambdaLR(optimizer, lambda step: 1.0 if step < 5 else -1.0, last_epoch)


@pytest.mark.parametrize("name", ["lora_finetune_single_device", "full_finetune_single_device"])
def test_a_run_is_judged_by_the_weights_that_are_used(name, tmp_path, caplog):
    """The best is at step 5 of 12, the last is worse: verdict and page say the loss of the best."""
    code, output_dir = run_main(name, tmp_path, **SETTINGS, keep_best="val_loss", log_level="INFO")
    assert code == 0
    run = RunFolder(output_dir)
    best = run.best
    after = run.measured("after")
    assert best["step"] < 12
    assert after["best"] == best
    assert after["on"] == "dataset_val"
    # All 24 rows are validation data; the probe measures eight of them with the weights of the best checkpoint.
    assert math.isclose(fmean(after["values"].values()), best["value"], rel_tol=0.5)
    assert fmean(after["values"].values()) < validated_last(output_dir) * 0.9
    location = f"of {best['checkpoint']}, with the best val_loss, {best['value']:.4g} at step {best['step']}"
    assert location in str(judge(run))
    assert "verdict     learned: loss of 8 rows of dataset_val" in caplog.text
    page = (output_dir / "report.html").read_text()
    assert "with the best checkpoint" in page
    assert f"at step {best['step']}, in {best['checkpoint']}" in page
    assert json.loads((output_dir / "report.json").read_text())["best"] == best
    assert "all of its 24 rows are training data, too" in caplog.text
    assert "all of its 24 rows are training data, too" in page


def test_two_ranks_measure_the_best_checkpoint_together(tmp_path, forker):
    settings = SETTINGS | {"keep_best": "val_loss", "batch_size": 1, "log_level": "INFO"}
    run = forker.run_on_two("full_finetune_distributed", tmp_path, **settings)
    best = RunFolder(run.output_dir).best
    after = RunFolder(run.output_dir).measured("after")
    assert after["best"] == best
    assert fmean(after["values"].values()) < validated_last(run.output_dir) * 0.9
    assert "failed" not in run.said


def validated_last(output_dir):
    return [record["val_loss"] for record in read_log(output_dir) if "val_loss" in record][-1]


def validated(run):
    return {record["step"]: record["val_loss"] for record in run.records if "val_loss" in record}


def folders(output_dir):
    return {path.name for path in output_dir.iterdir() if path.is_dir() and path.name != "logs"}


def test_the_best_is_kept_and_the_run_ends_early(tmp_path, caplog, tune):
    run = start(NAME, tmp_path, **SETTINGS, keep_best="val_loss", checkpointer__keep_last_n_checkpoints=1)
    values = validated(run)
    best_at = {step: min(range(1, step + 1), key=values.__getitem__) for step in values}
    assert len(values) == 12, "without a patience it goes on"
    assert folders(run.output_dir) == {f"step_{best_at[12]}", "epoch_0"}, "a best between two saves is saved and kept"

    # The first step whose best so far is PATIENCE steps old.
    end = next(step for step in values if step - best_at[step] == PATIENCE)
    best = best_at[end]
    assert end < len(values)

    settings = SETTINGS | {"early_stopping_patience": PATIENCE, "log_level": "INFO"}
    full_run = start(NAME, tmp_path, **settings, save_every_n_steps=1, checkpointer__keep_last_n_checkpoints=20)
    assert validated(full_run) == {step: values[step] for step in range(1, end + 1)}
    assert json.loads((full_run.output_dir / "best.json").read_text())["best"][-1] == {
        "checkpoint": f"step_{best}",
        "step": best,
        "value": values[best],
    }

    # The best is what tune eval takes of a run, and what it measures is what validation did.
    tune("eval", full_run.output_dir, "--device", "cpu", "--dtype", "fp32", "--output", tmp_path)
    (result,) = json.loads((tmp_path / "dataset_val.results.json").read_text())["models"]
    assert result["perplexity"]["loss"] == pytest.approx(values[best], rel=1e-5)

    # Stopped in between, and saved at the bests and the end alone: the rest is the same, the best survives pruning.
    resumed = tmp_path / "resumed"
    for name in (f"step_{best}", f"step_{best + 1}"):
        shutil.copytree(full_run.output_dir / name, resumed / name)
    shutil.copy(full_run.output_dir / "best.json", resumed)
    again = {**settings, "checkpointer__keep_last_n_checkpoints": 1, "resume_from_checkpoint": True}
    remaining = validated(start(NAME, tmp_path, **again, output_dir=resumed))
    assert remaining == {step: values[step] for step in range(best + 2, end + 1)}
    assert folders(resumed) == {f"step_{best}", f"step_{end}"}

    # A run that has ended early does nothing more, and says what came of it.
    module = load_recipe(NAME, tmp_path)
    config = write_config(NAME, tmp_path, resumed, **again)
    with caplog.at_level("INFO", logger="torchtune"):
        assert module.recipe_main(load_and_check(config, [], module.recipe_main)) == 0
    reason = f"3 validations in a row were not better than the best (val_loss {values[best]:.4f} at step {best})."
    assert f"stopped early: {reason}" in caplog.text
    assert f"  best        {resumed / f'step_{best}'}, val_loss {values[best]:.4f} at step {best}\n" in caplog.text
    asked = f"  ask it      tune chat --model {tmp_path / 'checkpoint'} --adapter {resumed / f'step_{best}'}"
    assert asked in caplog.text, "the best is asked, not the last"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"keep_best": "val_loss"},
            "keep_best: compares validation results: set run_val_every_n_steps and dataset_val",
        ),
        (
            {"early_stopping_patience": 2},
            "early_stopping_patience: compares validation results: set run_val_every_n_steps",
        ),
        (SETTINGS | {"keep_best": "loss"}, "keep_best: must be a validation metric, such as val_loss or max:val_"),
    ],
)
def test_settings_of_the_best_checkpoint_that_do_not_fit_are_refused_before_the_start(tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        start(NAME, tmp_path, **settings)


def test_a_metric_that_validation_lacks_is_named_with_those_it_has(tmp_path):
    settings = {**SETTINGS, "run_val_every_n_steps": 2, "output_dir": tmp_path / "run"}
    with pytest.raises(
        ValidationMetricError,
        match=r"has no val_los \(did you mean val_loss\?\): choose one of val_entropy, val_loss",
    ):
        start(NAME, tmp_path, **settings, keep_best="val_los")
    assert folders(tmp_path / "run") == {"step_2"}, "the steps before the first validation are not lost"
    run = start(NAME, tmp_path, **settings, keep_best="val_loss", resume_from_checkpoint=True, train=False)
    assert run.recipe.global_step == 2


def test_a_copied_recipe_keeps_the_best_by_a_metric_of_its_own(tmp_path):
    measured = "                if name := control.checkpoint_due(self.global_step):\n"
    recorded_score = (
        "                control.record_validation(self.global_step, {'score': -abs(self.global_step - 3)})\n"
    )
    changes = {measured: recorded_score + measured}
    run = start(NAME, tmp_path, changes=changes, epochs=1, max_steps_per_epoch=5, keep_best="max:score")
    assert run.recipe.best.best_checkpoint()[1] == "score 0.0000 at step 3"
    record = json.loads((run.output_dir / "best.json").read_text())
    assert (record["keep_best"], record["best"][-1]["checkpoint"]) == ("max:score", "step_3")


def test_validation_without_the_users_metric_does_not_count(tmp_path):
    best = BestValidation(tmp_path, "max:score", patience=1)
    assert not best.update(1, {"val_loss": 2.0})
    assert best.is_missing
    assert not best.should_stop
    assert best.update(2, {"score": 0.5})
    assert not best.update(3, {"val_loss": 1.0})
    assert not best.is_missing
    assert not best.should_stop
    assert not best.update(4, {"score": 0.4})
    assert best.should_stop


def test_nan_is_never_the_best(tmp_path):
    best = BestValidation(tmp_path, "max:val_x", patience=2)
    seen = [best.update(step, {"val_x": value}) for step, value in enumerate([math.nan, 1.0, math.inf, 0.5])]
    assert seen == [False, True, False, False]
    assert best.should_stop
