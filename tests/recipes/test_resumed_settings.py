"""A resume says which settings take effect, and refuses those that cannot change."""

import dataclasses
import logging
import shutil
from typing import get_type_hints

import pytest
import torch
import yaml

from tests.recipes.runs import load_recipe, read_log, start
from tools.recipe_table import recipes_in
from torchtune.checkpoints import CheckpointError
from torchtune.checkpoints._resume import ON_RESUME, OnResume, check_resumed_settings
from torchtune.utils import get_logger

NAME = "lora_finetune_single_device"


def test_every_setting_of_every_training_recipe_is_classified(tmp_path):
    names = set()
    for recipe in recipes_in("training"):
        settings = get_type_hints(load_recipe(recipe, tmp_path).recipe_main)["cfg"]
        names |= {field.name for field in dataclasses.fields(settings)}
    assert "optimizer" in names
    assert {name for name in ON_RESUME if "." not in name} - {"recipe"} == names - {"recipe"}
    assert {name.partition(".")[0] for name in ON_RESUME} - {"recipe"} <= names


@pytest.fixture
def said():
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = get_logger()
    level = logger.level
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)


def lora(alpha):
    return [{"_component_": "torchtune.modules.peft.LoRA", "rank": 4, "alpha": alpha}]


def test_a_resume_says_which_changed_settings_take_effect_and_refuses_the_others(said, tmp_path):
    settings = {"save_every_n_steps": 4, "log_level": "INFO", "model_converters": lora(8)}
    first = start(NAME, tmp_path, **settings)
    shutil.rmtree(first.output_dir / "step_12")
    resume = {**settings, "output_dir": first.output_dir, "resume_from_checkpoint": True}

    def files():  # the lock goes when the process that was refused ends
        return sorted(path for path in first.output_dir.rglob("*") if path.name != ".run.lock")

    before = files()

    def refused(**changes):
        with pytest.raises(CheckpointError) as caught:
            start(NAME, tmp_path, train=False, **{**resume, **changes})
        assert files() == before
        return str(caught.value)

    message = refused(optimizer__lr=5e-4)
    assert "step_8/torchtune_config.yaml" in message
    assert "optimizer.lr was 0.01 and is 0.0005 now: set it back, or start a new run" in message
    assert "lr_scheduler.num_warmup_steps was 2 and is 3 now" in refused(lr_scheduler__num_warmup_steps=3)
    assert "model_converters.0.alpha was 8.0 and is 16.0 now" in refused(model_converters=lora(16))
    message = refused(shuffle=False, optimizer__weight_decay=0.1, log_every_n_steps=2)
    assert "optimizer.weight_decay was not set and is 0.1 now; shuffle was True and is False now: set them" in message

    said.clear()
    with pytest.raises(CheckpointError, match="'loader' does not fit this run"):
        start(NAME, tmp_path, train=False, **{**resume, "batch_size": 5})
    assert not any("takes effect" in line for line in said), "nothing was resumed"

    said.clear()
    start(NAME, tmp_path, **{**resume, "log_every_n_steps": 2, "seed": 8, "loss__num_output_chunks": 4})
    (new,) = [line for line in said if "takes effect" in line]
    assert new.endswith("log_every_n_steps was 1 and is 2 now; loss.num_output_chunks was not set and is 4 now.")
    (message_of_seed,) = [line for line in said if "goes on" in line]
    assert message_of_seed.endswith("seed was 7 and is 8 now.")
    assert [record["step"] for record in read_log(first.output_dir) if "loss" in record][12:] == [10, 12]


@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [
        *(("torch.optim.AdamW", precision) for precision in ("stochastic_rounding", "fp32_master", "param_dtype")),
        *(("torchao.optim.AdamW8bit", precision) for precision in ("stochastic_rounding", "fp32_master")),
    ],
)
def test_a_run_in_bf16_goes_on_in_fp32(said, tmp_path, optimizer, precision):
    """No value changes: those of fp32 master weights are the weights, and others are what bf16 rounded them to."""
    settings = {"epochs": 2, "log_level": "INFO", "optimizer_precision": precision}
    settings |= {"optimizer___component_": optimizer, "gradient_accumulation_steps": 4}
    first = start("full_finetune_single_device", tmp_path, **settings, dtype="bf16")
    shutil.rmtree(first.output_dir / "epoch_1")
    resume = {**settings, "output_dir": first.output_dir, "resume_from_checkpoint": True, "train": False}
    narrow = start("full_finetune_single_device", tmp_path, **resume, dtype="bf16").recipe
    said.clear()
    wide = start("full_finetune_single_device", tmp_path, **resume, dtype="fp32").recipe
    assert any(
        "dtype was bf16 and is fp32 now (weights and optimizer states keep their values" in line for line in said
    )
    names = dict(narrow.model.named_parameters())
    masters = narrow.optimizer.state_dict()["state"] if precision == "fp32_master" else {}
    for name, parameter in wide.model.named_parameters():
        expected = masters[name]["master"] if masters else names[name].float()
        assert torch.equal(parameter, expected)
        before = narrow.optimizer.state[names[name]]
        after = wide.optimizer.state[parameter]
        assert before.keys() - {"master"} == after.keys()
        if "torchao" not in optimizer:
            assert all(torch.equal(before[key].float(), after[key]) for key in ("exp_avg", "exp_avg_sq", "step"))
    with pytest.raises(CheckpointError, match="dtype was bf16 and is fp16 now"):
        check_resumed_settings({"dtype": "fp16"}, first.output_dir / "epoch_0")


def test_changed_settings_of_a_users_recipe_do_not_stop_a_resume(said, tmp_path):
    """What nobody classified is read by the recipe; a secret and a setting of another release are no change."""
    text = yaml.safe_dump(
        {"mine": {"a": [1, 2], "b": "x"}, "gone": 1, "metric_logger": {"api_key": "<redacted>"}, "seed": 1}
    )
    (tmp_path / "torchtune_config.yaml").write_text(text)
    get_logger("INFO")
    now = {"mine": {"a": [1, 3], "b": ["x"]}, "come": 2, "metric_logger": {"api_key": "abc"}, "seed": None}
    sentences = check_resumed_settings(now, tmp_path)
    changes = "mine.a.1 was 2 and is 3 now; mine.b was x and is ['x'] now"
    assert sentences == [f"Resumed with other settings, the new value takes effect: {changes}."]
    (tmp_path / "torchtune_config.yaml").write_text("- 1")
    with pytest.raises(CheckpointError, match=r"torchtune_config\.yaml holds no settings"):
        check_resumed_settings(now, tmp_path)


def test_a_setting_inside_a_section_follows_the_section_unless_it_is_listed():
    assert ON_RESUME["model"] is OnResume.FIXED
    assert ON_RESUME["model.checkpoint_dir"] is OnResume.NEW


def test_a_resume_warns_if_the_checkpoint_has_no_config(said, tmp_path):
    get_logger("INFO")
    check_resumed_settings(None, tmp_path)
    (line,) = said
    assert line.startswith(f"{tmp_path / 'torchtune_config.yaml'} is missing")
    assert "the learning rate, goes on, whatever optimizer and lr_scheduler say now" in line
