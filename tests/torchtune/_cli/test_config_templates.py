"""Configs of any model and any method, made from the templates when they are named."""

import importlib
import re
from pathlib import Path

import pytest
import yaml

from torchtune._config_templates import (
    configs_on_demand,
    methods,
    models,
    reason_against,
    reason_without_config,
    recipe_of_method,
    usual_methods,
)
from torchtune._recipe_registry import find_config, get_all_recipes
from torchtune.config import load_and_check

ASSETS = Path(__file__).parent / "assets"


@pytest.mark.parametrize("method", methods())
def test_configs_on_demand_of_a_method_are_well_formed(method):
    main = importlib.import_module(f"recipes.{recipe_of_method(method)}").recipe_main
    names = [name for name, (_, method_of_name) in configs_on_demand().items() if method_of_name == method]
    for name in names[::24]:
        settings = load_and_check(name, [], main)
        if method not in ("generation", "evaluation"):
            assert settings.output_dir == f"/tmp/torchtune/{name}"


@pytest.mark.parametrize("model", models()["models"])
def test_usual_configs_of_a_model_are_found(model):
    for method in usual_methods(model):
        config = yaml.safe_load(find_config(f"{model}_{method}").read_text())
        assert config["recipe"] == recipe_of_method(method)
        assert models()["models"][model]["repo"] in find_config(f"{model}_{method}").read_text()


def shipped_configs():
    names = set()
    for recipe in get_all_recipes():
        names.update(config.name for config in recipe.configs)
    return names


def test_names_that_were_files_are_made_when_they_are_named():
    names = (ASSETS / "former_files.txt").read_text().split()
    assert len(names) == 173
    shipped = shipped_configs()
    assert not shipped.intersection(names)
    assert set(names) <= set(configs_on_demand())


@pytest.mark.parametrize("path", sorted((ASSETS / "former_files").rglob("*.yaml")), ids=lambda path: path.stem)
def test_name_that_was_a_file_has_the_settings_of_the_file(path):
    name = path.relative_to(ASSETS / "former_files").with_suffix("").as_posix()
    assert yaml.safe_load(find_config(name).read_text()) == yaml.safe_load(path.read_text())


def test_files_are_the_names_of_earlier_releases_and_those_of_examples():
    files = shipped_configs()
    families = {name.partition("/")[0] for name in files if "/" in name}
    assert 180 <= len(files) <= 220
    assert {"llama3_1", "qwen2_5", "gemma2", "smol"} <= families
    assert not families & {"gemma3", "qwen3_vl", "glm4"}


def test_every_model_of_the_table_has_configs_on_demand_or_a_reason():
    names = set(configs_on_demand())
    for model in models()["models"]:
        has_config = any(name.startswith(f"{model}_") for name in names)
        assert has_config or reason_against(model, "lora_dpo_single_device")


def test_configs_made_on_demand_have_other_names_than_files():
    shipped = shipped_configs()
    assert not shipped & set(configs_on_demand())


def test_on_demand_config_is_that_of_its_model():
    config = yaml.safe_load(find_config("qwen3/8B_lora_dpo_single_device").read_text())
    assert config["recipe"] == "dpo"
    assert config["model"]["_component_"] == "torchtune.models.qwen3.lora_qwen3_8b_instruct"
    assert config["checkpointer"]["checkpoint_dir"] == "/tmp/Qwen3-8B"


@pytest.mark.parametrize(
    ("name", "group"), [("gemma3/4B_qat_full", 256), ("qwen2_5/72B_qat_lora", 128), ("smol/360M_quantization", 64)]
)
def test_group_of_a_scale_divides_the_widths_of_the_model(name, group):
    # 360M: 960 inputs; 72B: 29,568 inputs of down_proj = 231 * 128; 4B: 2,560 and 10,240.
    assert yaml.safe_load(find_config(name).read_text())["quantizer"]["groupsize"] == group


def test_full_distillation_trains_the_model_itself():
    config = yaml.safe_load(find_config("gemma3/4B_full_kd").read_text())
    assert config["recipe"] == "knowledge_distillation"
    assert config["model"] == {"_component_": "torchtune.models.gemma3.gemma3_4b"}
    assert config["teacher_model"]["_component_"] == "torchtune.models.gemma3.gemma3_12b"
    assert config["dtype"] == "bf16"


def test_ppo_on_several_devices_shards_its_models():
    config = yaml.safe_load(find_config("qwen3/8B_full_ppo").read_text())
    assert config["policy_model"]["_component_"] == "torchtune.models.qwen3.qwen3_8b_instruct"
    assert config["reward_and_value_model"]["base_model_path"] == "torchtune.models.qwen3.qwen3_8b_instruct"
    assert config["dtype"] == "bf16"
    assert "--nproc-per-node 8" in find_config("qwen3/8B_full_ppo").read_text()


def test_teacher_is_the_next_larger_model_of_the_family():
    config = yaml.safe_load(find_config("qwen3/1.7B_KD_lora_single_device").read_text())
    assert config["teacher_model"]["_component_"] == "torchtune.models.qwen3.qwen3_4b_instruct"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("qwen3/32B_full_single_device", "33 billion parameters, too many for one device: see qwen3/32B_full$"),
        ("qwen3/8B_qat_single_device", "8 billion parameters, too many for one device: see qwen3/8B_qat_full$"),
        ("qwen3/32B_lora_dpo_single_device", "33 billion parameters, too many for one device: see qwen3/32B_lora_dpo$"),
        ("gemma3/4B_full_ppo_single_device", "4 billion parameters, too many for one device: see gemma3/4B_full_ppo$"),
        ("gemma3/12B_full_kd_single_device", "its teacher gemma3/27B 27 billion, too .*: see gemma3/12B_full_kd$"),
        ("qwen3/14B_KD_lora_single_device", "its teacher qwen3/32B 33 billion.*: see qwen3/14B_KD_lora_distributed"),
        ("qwen3/32B_generation", "qwen3/32B has 33 billion parameters, too many for one device$"),
        ("qwen3_vl/4B_lora_dpo", "reads images, which only configs of fine-tuning do: use its text decoder"),
        ("qwen3_vl/4B_qat_full", "reads images, which only configs of fine-tuning do: use its text decoder"),
        ("smol/1.7B_KD_lora_single_device", "no larger model of its family has the vocabulary of smol/1.7B: any_kd"),
        ("mistral/7B_full_kd", "no larger model of its family has the vocabulary of mistral/7B: any_kd takes any"),
        ("qwen3_moe/30B_A3B_dora", "has experts, which have no DoRA: see qwen3_moe/30B_A3B_lora"),
        ("olmoe/1B_7B_qat_lora", "olmoe/1B_7B has experts, which cannot be quantized yet"),
        ("smol/135M_full_multinode", "one machine holds smol/135M: see smol/135M_full$"),
        ("qwen3/8B_full_low_memory", "for the models whose configs are files: see qwen3/8B_full_single_device"),
        ("llama2/1B_lora", "llama2/1B has no builder of its own: the configs any_"),
    ],
)
def test_a_model_and_a_method_that_do_not_fit_are_refused_with_the_reason(tune, name, reason):
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
