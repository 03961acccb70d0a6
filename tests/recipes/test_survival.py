"""Bad steps are left out, and a checkpoint can be asked for."""

import json
import logging

import pytest
import torch
from filelock import FileLock

from tests.recipes.runs import TRAINING, after_each_step, read_log, resume, start
from torchtune.supervision import SkippedStepsError
from torchtune.utils import UserError

FAULTY = "tests.recipes.faulty.FaultyLoss"


@pytest.fixture(params=TRAINING)
def name(request):
    return request.param


def faulty(**arguments):
    return {"_component_": FAULTY, **arguments}


def records(output_dir):
    lines = (output_dir / "skipped_steps.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON")) for line in lines]


def test_a_step_that_is_not_finite_leaves_everything_as_it_was(name, tmp_path):
    """Steps 3 and 5 do not happen: weights and optimizer are those of a run that never had them."""
    run = start(
        name, tmp_path, loss=faulty(nan=[3], inf=[5]), optimizer={"_component_": "torch.optim.AdamW", "lr": 0.01}
    )
    assert [record["step"] for record in records(run.output_dir)] == [3, 5]
    assert all(torch.isfinite(parameter).all() for parameter in run.trained.values())
    steps = next(iter(run.recipe.optimizer.state_dict()["state"].values()))["step"]
    assert int(steps) == len(run.losses) - 2 == 10
    assert max(record.get("skipped_steps", 0) for record in read_log(run.output_dir)) == 2

    without = start(name, tmp_path, train=False).recipe
    rows = [without.loader.rows() for _ in without.loader]
    assert [record["rows"] for record in records(run.output_dir)] == [rows[2], rows[4]]
    assert rows[2][0]["source"] == str(tmp_path / "data.jsonl")


def test_the_micro_batch_that_is_not_finite_is_told(tmp_path):
    run = start("full_finetune_single_device", tmp_path, loss=faulty(nan=[4]), gradient_accumulation_steps=2)
    (record,) = records(run.output_dir)
    assert record["step"] == 2
    loader = start("full_finetune_single_device", tmp_path, gradient_accumulation_steps=2, train=False).recipe.loader
    steps = [(loader.rows(), loader.rows([(1, 0)])) for _ in loader]
    assert record["rows"] == steps[1][1]
    assert len(record["rows"]) == 2 < len(steps[1][0]) == 4


def test_too_many_in_a_row_end_the_run(name, tmp_path):
    with pytest.raises(SkippedStepsError, match=r"3 steps in a row were skipped, the last, 6, because its loss is nan"):
        start(name, tmp_path, loss=faulty(nan=[2, 4, 5, 6]), max_skipped_steps=3)


def test_a_spike_is_skipped_and_the_count_survives_a_resume(tmp_path):
    settings = {"epochs": 5, "save_every_n_steps": 40, "lr_scheduler": None, "loss_spike_threshold": 6.0}
    settings["optimizer"] = {"_component_": "torch.optim.SGD", "lr": 1e-4}
    name = "full_finetune_single_device"
    whole = start(name, tmp_path, loss=faulty(nan=[38], spike=[20, 45]), **settings)
    # There is nothing to measure the first one against yet.
    assert [record["step"] for record in records(whole.output_dir)] == [38, 45]
    assert "far above the mean" in records(whole.output_dir)[1]["reason"]
    resumed = resume(name, tmp_path, whole, 40, **settings, loss=faulty(spike=[5]))
    assert [record["step"] for record in records(resumed.output_dir)] == [45]
    assert resumed.recipe.guard.num_skipped == 2


def test_a_file_named_save_asks_for_a_checkpoint(name, tmp_path):
    text = 'if self.global_step == 3: open(cfg.output_dir + "/SAVE", "w").close()'
    run = start(name, tmp_path, changes=after_each_step(text))
    assert sorted(path.name for path in run.output_dir.glob("*_?")) == ["epoch_0", "step_3"]
    assert not (run.output_dir / "SAVE").exists()
    assert (run.output_dir / "step_3" / ".complete").exists()


def test_two_runs_do_not_share_a_folder(tmp_path):
    folder = tmp_path / "shared"
    folder.mkdir()
    with FileLock(folder / ".run.lock"), pytest.raises(UserError, match="in use by another run"):
        start("full_finetune_single_device", tmp_path, train=False, output_dir=folder)


def test_asynchronous_saves_are_those_of_synchronous_ones(name, tmp_path):
    settings = {"save_every_n_steps": 3, "gradient_accumulation_steps": 1}
    for in_backward in (False, True):
        runs = [
            start(name, tmp_path, **settings, optimizer_in_bwd=in_backward, enable_async_checkpointing=behind)
            for behind in (False, True)
        ]
        for step in ("step_3", "step_6", "step_9", "step_12"):
            found = [
                sorted(path.relative_to(run.output_dir) for path in (run.output_dir / step).rglob("*")) for run in runs
            ]
            assert found[0] == found[1]
            for path in found[0]:
                if path.suffix == ".safetensors":
                    one, other = ((run.output_dir / path).read_bytes() for run in runs)
                    assert one == other, path


def test_a_checkpoint_that_cannot_be_written_costs_no_run(name, tmp_path, caplog):
    """The limit on the size of files stands in for a full disk; it is lifted before the last save."""
    import resource

    for behind in (False, True):
        limit = (
            "import resource\n"
            f"{' ' * 16}hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]\n"
            f"{' ' * 16}low = 20_000 if self.global_step == 3 else hard\n"
            f"{' ' * 16}self.checkpointer.close()\n"
            f"{' ' * 16}resource.setrlimit(resource.RLIMIT_FSIZE, (low, hard))"
        )
        with caplog.at_level(logging.WARNING):
            run = start(
                name,
                tmp_path,
                changes=after_each_step(limit),
                save_every_n_steps=3,
                enable_async_checkpointing=behind,
                log_level="WARNING",
            )
        assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        assert "step_3 was not saved, training goes on" in caplog.text
        assert sorted(path.name for path in run.output_dir.glob("step_*")) == ["step_12", "step_6", "step_9"]
        assert len(run.losses) == 12
        caplog.clear()
