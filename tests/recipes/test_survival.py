"""Bad steps are left out, and a checkpoint can be asked for."""

import json
import logging

import pytest
import torch
from filelock import FileLock

from tests.devices import DEVICE
from tests.recipes.late import decide_late
from tests.recipes.runs import CHATS, TRAINING, after_each_step, read_log, resume, start
from torchtune import training
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


def test_rows_of_the_micro_batch_that_is_not_finite_are_recorded(tmp_path):
    run = start("full_finetune_single_device", tmp_path, loss=faulty(nan=[4]), gradient_accumulation_steps=2)
    (record,) = records(run.output_dir)
    assert record["step"] == 2
    loader = start("full_finetune_single_device", tmp_path, gradient_accumulation_steps=2, train=False).recipe.loader
    steps = [(loader.rows(), loader.rows([(1, 0)])) for _ in loader]
    assert record["rows"] == steps[1][1]
    assert len(record["rows"]) == 2 < len(steps[1][0]) == 4


def test_too_many_skipped_steps_in_a_row_end_the_run(name, tmp_path):
    with pytest.raises(SkippedStepsError, match=r"3 steps in a row were skipped, the last, 6, because its loss is nan"):
        start(name, tmp_path, loss=faulty(nan=[2, 4, 5, 6]), max_skipped_steps=3)


FUSED = {"_component_": "torch.optim.AdamW", "lr": 0.01, "fused": True}
FAULTS = faulty(nan=[1, 3], inf=[5])
DECIDED_BY_HOST = {"training.DeviceSkips(self.optimizer, self.model),": "None,"}
# Of the log: what is a time.
TIMES = ("elapsed", "lost_to", "mfu", "peak", "time", "tokens_per_second", "trained_tokens_per_second")


@pytest.fixture
def decides_late(monkeypatch):
    """On a CUDA device, nothing is to be done for it."""
    return lambda: decide_late(monkeypatch) if DEVICE == "cpu" else None


def without_times(rows):
    timeless_rows = []
    for row in rows:
        timeless_rows.append({name: value for name, value in row.items() if not name.startswith(TIMES)})
    return timeless_rows


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("full_finetune_single_device", {"dtype": "bf16", "loss": FAULTS, "run_val_every_n_steps": 2}),
        ("full_finetune_single_device", {"optimizer": FUSED, "loss": FAULTS, "log_every_n_steps": 4}),
        ("lora_finetune_single_device", {"dtype": "bf16", "loss": FAULTS, "optimizer_precision": "fp32_master"}),
        ("full_finetune_single_device", {"dtype": "fp16", "loss": FAULTS}),
        ("grpo", {"optimizer": FUSED, "num_iterations": 2, "show_samples_every_n_steps": 1}),
        ("grpo", {"dtype": "fp16", "num_iterations": 2, "show_samples_every_n_steps": 1}),
    ],
)
def test_steps_that_the_device_decides_are_those_that_the_host_decides(
    name, settings, tmp_path, decides_late, monkeypatch
):
    """Log, skipped steps, weights and optimizer are the same to the bit, and so is a resume from a checkpoint."""
    # In float16, steps overflow before the checkpoint and after it.
    monkeypatch.setattr(training.LossScaler, "START", 2.0**19)
    monkeypatch.setattr(training.LossScaler, "STEPS_TO_DOUBLE", 1)
    settings = {**settings, "save_every_n_steps": 6}
    if "run_val_every_n_steps" in settings:
        settings["dataset_val"] = {**CHATS, "source": "json", "data_files": str(tmp_path / "data.jsonl")}
    by_host = start(name, tmp_path, **settings, changes=DECIDED_BY_HOST)
    decides_late()
    by_device = start(name, tmp_path, **settings)
    assert training.DeviceSkips(by_device.recipe.optimizer, by_device.recipe.model).is_supported

    assert without_times(by_device.records) == without_times(by_host.records)
    for key, value in by_host.trained.items():
        assert torch.equal(value, by_device.trained[key]), key
    states = [run.recipe.optimizer.state_dict() for run in (by_device, by_host)]
    torch.testing.assert_close(states[0]["state"], states[1]["state"], rtol=0, atol=0)
    assert states[0].get("precision") == states[1].get("precision")
    is_scaled = settings.get("dtype") == "fp16"
    if settings.get("loss") == FAULTS or is_scaled:
        skipped = [without_times(records(run.output_dir)) for run in (by_device, by_host)]
        assert skipped[0] == skipped[1]
        steps = [record["step"] for record in skipped[0]]
        if is_scaled:
            assert any("its gradient overflows fp16" in record["reason"] for record in skipped[0])
            assert isinstance(by_device.recipe.scaler.factor, torch.Tensor)
            assert by_device.recipe.scaler.factor.item() == by_host.recipe.scaler.factor
        else:
            assert steps == [1, 3, 5]
    if settings.get("loss") == FAULTS:
        assert {1, 3, 5} <= set(steps)
        settings["loss"] = faulty()
    resume(name, tmp_path, by_device, 6, **settings)


def test_late_decisions_end_a_run_after_as_many_steps(tmp_path, decides_late):
    logs = []
    for number, changes in enumerate((DECIDED_BY_HOST, None)):
        output_dir = tmp_path / f"run_{number}"
        with pytest.raises(SkippedStepsError, match=r"3 steps in a row were skipped, the last, 6, because its loss"):
            start(
                "full_finetune_single_device",
                tmp_path,
                loss=faulty(nan=[2, 4, 5, 6]),
                optimizer=FUSED,
                max_skipped_steps=3,
                output_dir=output_dir,
                changes=changes,
            )
        logs.append(without_times(read_log(output_dir)))
        decides_late()
    assert logs[0] == logs[1]
    assert [record["step"] for record in logs[0]] == [1, 2, 3, 4, 5]


def test_step_before_an_error_is_logged(tmp_path, decides_late):
    decides_late()
    fails = 'if self.global_step == 3: raise RuntimeError("broken")'
    output_dir = tmp_path / "run"
    with pytest.raises(RuntimeError, match="broken"):
        start(
            "full_finetune_single_device",
            tmp_path,
            optimizer=FUSED,
            output_dir=output_dir,
            changes=after_each_step(fails),
        )
    assert [record["step"] for record in read_log(output_dir)] == [1, 2, 3]


def test_a_spike_is_skipped_and_the_count_survives_a_resume(tmp_path):
    settings = {"epochs": 5, "save_every_n_steps": 40, "lr_scheduler": None, "loss_spike_threshold": 6.0}
    settings["optimizer"] = {"_component_": "torch.optim.SGD", "lr": 1e-4}
    name = "full_finetune_single_device"
    full_run = start(name, tmp_path, loss=faulty(nan=[38], spike=[20, 45]), **settings)
    # There is nothing to measure the first one against yet.
    assert [record["step"] for record in records(full_run.output_dir)] == [38, 45]
    assert "far above the mean" in records(full_run.output_dir)[1]["reason"]
    resumed = resume(name, tmp_path, full_run, 40, **settings, loss=faulty(spike=[5]))
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
        settings["optimizer_in_bwd"] = in_backward
        synchronous = start(name, tmp_path, **settings, enable_async_checkpointing=False).output_dir
        asynchronous = start(name, tmp_path, **settings, enable_async_checkpointing=True).output_dir
        for step in ("step_3", "step_6", "step_9", "step_12"):
            files = sorted(path.relative_to(synchronous) for path in (synchronous / step).rglob("*"))
            assert files == sorted(path.relative_to(asynchronous) for path in (asynchronous / step).rglob("*"))
            for path in files:
                if path.suffix == ".safetensors":
                    assert (synchronous / path).read_bytes() == (asynchronous / path).read_bytes(), path


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
        with caplog.at_level(logging.INFO):
            run = start(
                name,
                tmp_path,
                changes=after_each_step(limit),
                save_every_n_steps=3,
                enable_async_checkpointing=behind,
                log_level="INFO",
            )
        assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        assert "step_3 was not saved, training goes on" in caplog.text
        assert "step_3 was saved" not in caplog.text
        assert sorted(path.name for path in run.output_dir.glob("step_*")) == ["step_12", "step_6", "step_9"]
        assert len(run.losses) == 12
        caplog.clear()
