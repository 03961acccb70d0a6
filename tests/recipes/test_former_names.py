"""Names of earlier releases lead to the recipe that does what they say, or the run is refused."""

import shutil

import pytest
import yaml

from tests.recipes.runs import start, write_config
from torchtune.supervision import StepGuard


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("qat_single_device", {"quantizer": None}, "quantizer: is missing, and qat_single_device trains for a"),
        ("lora_dpo_single_device", {"model_converters": []}, "model: it has no adapters to train: use a lora_*"),
        ("lora_finetune_single_device", {"model_converters": []}, "model: it has no adapters to train"),
    ],
)
def test_a_name_that_asks_for_more_than_the_config_has_is_refused(name, change, said, tmp_path, tune):
    config = write_config(name, tmp_path, tmp_path / "run", **change)
    assert said in tune("run", "--config", config, "--dry-run").err
    config.write_text(config.read_text().replace(f"recipe: {name}\n", ""))  # the name is typed
    result = tune("run", name, "--config", config, "--dry-run")
    assert (result.code, said in result.err) == (2, True), result


@pytest.mark.parametrize("own", [True, False])
def test_recipe_of_the_command_line_takes_precedence_over_the_config(own, tmp_path, tune):
    name = "full_finetune_distributed" if own else "full_finetune_single_device"
    config = write_config(name, tmp_path, tmp_path / "run")
    result = tune("run", "--nproc-per-node", 2, "qat_distributed", "--config", config)
    assert "quantizer: is missing, and qat_distributed trains for a quantized" in result.err
    config = write_config("lora_dpo_single_device", tmp_path, tmp_path / "run")
    result = tune("run", "full_dpo_distributed", "--config", config, "--dry-run")
    assert "model: it has adapters, but full_dpo_distributed trains all weights" in result.err
    assert result.code == 2


def test_a_former_name_runs_and_is_kept(tmp_path, tune):
    config = write_config("full_dpo_single_device", tmp_path, tmp_path / "run")
    assert tune("run", "full_dpo_distributed", "--config", config, "--dry-run").code == 0
    run = start("full_dpo_single_device", tmp_path, max_steps_per_epoch=1)
    (saved,) = run.output_dir.glob("epoch_0/torchtune_config.yaml")
    assert yaml.safe_load(saved.read_text())["recipe"] == "full_dpo_single_device"


def test_a_run_saved_by_an_earlier_release_resumes(tmp_path, monkeypatch):
    """Its guard had the best validation in its state, which is an entry of its own now."""
    settings = {"run_val_every_n_steps": 2, "keep_best": "val_loss", "dataset_val": "${dataset}"}
    settings |= {"save_every_n_steps": 4, "checkpointer__keep_last_n_checkpoints": 9}
    name = "full_finetune_single_device"
    best = {"keep_best": "val_loss", "records": [], "best": [2, -1.0], "waited": 1}
    with monkeypatch.context() as patch:
        state_dict = StepGuard.state_dict
        patch.setattr(StepGuard, "state_dict", lambda self: {**state_dict(self), "best": best})
        full_run = start(name, tmp_path, changes={'            "best": self.best,\n': ""}, **settings)
    for path in full_run.output_dir.glob("step_*"):
        if path.name != "step_4":
            shutil.rmtree(path)
    losses = full_run.losses
    again = start(name, tmp_path, output_dir=full_run.output_dir, resume_from_checkpoint=True, **settings)
    assert again.losses == losses
    assert again.recipe.best.describe() == "val_loss -1.0000 at step 2"
