"""The contract suite: what every training recipe promises, on every training recipe."""

import shutil
from pathlib import Path

import pytest

from tests.recipes import checks
from tests.recipes.runs import TRAINING, WEIGHTS, read_log, start
from torchtune.utils import UserError


@pytest.fixture(scope="module", params=TRAINING)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_accumulation_changes_nothing(name: str, tmp_path: Path) -> None:
    checks.accumulation_changes_nothing(name, tmp_path)


def test_packing_changes_nothing(name: str, tmp_path: Path) -> None:
    checks.packing_changes_nothing(name, tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"loss__num_output_chunks": 1}, id="one-chunk"),
        pytest.param({"loss__num_output_chunks": 64}, id="many-chunks"),
        pytest.param({"enable_activation_checkpointing": True}, id="activation-checkpointing"),
        pytest.param({"optimizer_in_bwd": True}, id="optimizer-in-backward"),
        pytest.param({"log_every_n_steps": 1, "log_peak_memory_stats": False}, id="logging"),
    ],
)
def test_setting_changes_nothing(name: str, tmp_path: Path, settings: dict) -> None:
    checks.setting_changes_nothing(name, tmp_path, settings)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lora_finetune_distributed"], indirect=True)
def test_compilation_changes_nothing(name: str, tmp_path: Path) -> None:
    checks.setting_changes_nothing(name, tmp_path, {"compile": True})


def test_documents_restart_positions(name: str, tmp_path: Path) -> None:
    checks.documents_restart_positions(name, tmp_path)


def test_end_of_turn_is_trained(name: str, tmp_path: Path) -> None:
    checks.end_of_turn_is_trained(name, tmp_path)


def test_loss_equals_transformers(name: str, tmp_path: Path) -> None:
    checks.loss_equals_transformers(name, tmp_path)


@pytest.mark.parametrize("name", WEIGHTS, indirect=True)
def test_losses_follow_plain_torch(name: str, tmp_path: Path) -> None:
    checks.losses_follow_plain_torch(name, tmp_path)


def test_resume_equals_uninterrupted(name: str, tmp_path: Path) -> None:
    checks.resume_equals_uninterrupted(name, tmp_path, dtype="bf16" if name.endswith("distributed") else "fp32")


@pytest.mark.parametrize(
    ("name", "precision"),
    [("full_finetune_distributed", "fp32_master"), ("lora_finetune_single_device", "param_dtype")],
    indirect=["name"],
)
def test_resume_in_every_precision(name: str, tmp_path: Path, precision: str) -> None:
    checks.resume_equals_uninterrupted(name, tmp_path, dtype="bf16", optimizer_precision=precision)


def test_resume_with_optimizer_in_backward(name: str, tmp_path: Path) -> None:
    checks.resume_equals_uninterrupted(
        name, tmp_path, optimizer_in_bwd=True, gradient_accumulation_steps=1, batch_size=4
    )


def test_export_equals_trained(name: str, tmp_path: Path) -> None:
    checks.export_equals_trained(name, tmp_path)


def test_schedule_runs_over_all_epochs(name: str, tmp_path: Path) -> None:
    checks.schedule_runs_over_all_epochs(name, tmp_path)


def test_one_epoch_saves_its_steps(name: str, tmp_path: Path) -> None:
    run = start(name, tmp_path, save_every_n_steps=5)
    saved = sorted(path.name for path in run.output_dir.glob("step_*"))
    assert saved == ["step_10", "step_12", "step_5"]
    assert all((run.output_dir / step / ".complete").exists() for step in saved)


def test_keeps_the_last_checkpoints(name: str, tmp_path: Path) -> None:
    run = start(name, tmp_path, epochs=4, batch_size=8, checkpointer__keep_last_n_checkpoints=2)
    assert sorted(path.name for path in run.output_dir.glob("epoch_*")) == ["epoch_2", "epoch_3"]


def test_saved_config_runs_again_unchanged(name: str, tmp_path: Path) -> None:
    from tests.recipes.runs import class_of, load_recipe
    from torchtune.config import load_and_check

    run = start(name, tmp_path, batch_size=4, seed=None)
    (saved,) = run.output_dir.glob("epoch_*/torchtune_config.yaml")
    copy = tmp_path / "again.yaml"
    shutil.copy(saved, copy)
    module = load_recipe(name, tmp_path)
    again = tmp_path / "again"
    overrides = [f"output_dir={again}", f"checkpointer.output_dir={again}", f"metric_logger.log_dir={again}/logs"]
    cfg = load_and_check(copy, overrides, module.recipe_main)
    recipe = class_of(module)(cfg)
    recipe.setup(cfg)
    recipe.train()
    recipe.cleanup()
    assert [r["loss"] for r in read_log(again) if "loss" in r] == list(run.losses.values())


def test_validation_is_the_mean_over_labels(name: str, tmp_path: Path) -> None:
    checks.validation_is_the_mean_over_labels(name, tmp_path)


def test_validation_leaves_training_alone(name: str, tmp_path: Path) -> None:
    checks.validation_leaves_training_alone(name, tmp_path)


def test_training_learns(name: str, tmp_path: Path) -> None:
    checks.training_learns(name, tmp_path)


def test_an_output_folder_that_holds_a_run_is_refused(name: str, tmp_path: Path) -> None:
    run = start(name, tmp_path, batch_size=8)
    with pytest.raises(UserError, match="resume_from_checkpoint"):
        start(name, tmp_path, batch_size=8, output_dir=run.output_dir)


def test_max_steps_per_epoch(name: str, tmp_path: Path) -> None:
    run = start(name, tmp_path, epochs=2, max_steps_per_epoch=3)
    assert list(run.losses) == [1, 2, 3, 4, 5, 6]
