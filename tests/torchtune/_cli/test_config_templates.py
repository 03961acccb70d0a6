"""Configs of any model and any method, made from the templates when they are named."""

import importlib
import re

import pytest
import yaml

from torchtune._config_templates import (
    configs_on_demand,
    models,
    reason_against,
    reason_without_config,
    recipe_on_demand,
)
from torchtune._recipe_registry import find_config, get_all_recipes
from torchtune.config import load_and_check


@pytest.mark.parametrize("name", list(configs_on_demand())[::40])
def test_config_on_demand_is_well_formed(name):
    main = importlib.import_module(f"recipes.{recipe_on_demand(name)}").recipe_main
    settings = load_and_check(name, [], main)
    assert settings.output_dir == f"/tmp/torchtune/{name}"


def test_every_model_of_the_table_has_configs_on_demand_or_a_reason():
    names = set(configs_on_demand())
    for model in models()["models"]:
        has_config = any(name.startswith(f"{model}_") for name in names)
        assert has_config or reason_against(model, "lora_dpo_single_device")


def test_no_name_on_demand_is_a_file():
    shipped = {config.name for recipe in get_all_recipes() for config in recipe.configs}
    assert not shipped & set(configs_on_demand())


def test_on_demand_config_is_that_of_its_model():
    config = yaml.safe_load(find_config("qwen3/8B_lora_dpo_single_device").read_text())
    assert config["recipe"] == "dpo"
    assert config["model"]["_component_"] == "torchtune.models.qwen3.lora_qwen3_8b_instruct"
    assert config["checkpointer"]["checkpoint_dir"] == "/tmp/Qwen3-8B"


def test_teacher_is_the_next_larger_model_of_the_family():
    config = yaml.safe_load(find_config("qwen3/1.7B_KD_lora_single_device").read_text())
    assert config["teacher_model"]["_component_"] == "torchtune.models.qwen3.qwen3_4b_instruct"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("qwen3/32B_full_single_device", "33 billion parameters, too many for one device: see qwen3/32B_full$"),
        ("qwen3/32B_KD_lora_single_device", "too many for one device: see qwen3/32B_KD_lora_distributed"),
        ("qwen3_vl/4B_lora_dpo", "reads images, and lora_dpo trains on text"),
        ("smol/1.7B_KD_lora_single_device", "largest of its family: any_kd takes any teacher"),
        ("qwen3_moe/30B_A3B_dora", "has experts, which have no DoRA: see qwen3_moe/30B_A3B_lora"),
        ("qwen3/8B_qat_full", "is for the models whose configs are files"),
    ],
)
def test_combination_that_cannot_be_says_why(tune, name, reason):
    assert re.search(reason, reason_without_config(name))
    assert find_config(name) is None
    result = tune("validate", name)
    assert result.code == 2
    assert reason_without_config(name) in result.err


def test_commands_know_names_on_demand(tune, tmp_path):
    name = "gemma3/4B_lora_dpo_single_device"
    text = tune("cat", name).out
    assert tune("cp", name, tmp_path / "mine.yaml").code == 0
    assert (tmp_path / "mine.yaml").read_text() == text
    assert tune("validate", name).code == 0
    assert "lora_dpo_single_device" in tune("ls", "gemma3", "4B").out
    assert " on demand" in tune("ls").out
