"""A copied recipe with a renamed setting works, or is told so in a sentence; the setting is never read as unset."""

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.recipes.runs import load_recipe, write_config
from torchtune import supervision, training
from torchtune._cli import tune
from torchtune._recipe_registry import RecipeTarget, get_all_recipes, settings_of_recipe
from torchtune.config import RecipeSettingsError, SettingsView, load_and_check
from torchtune.config._settings import KNOWN_SETTINGS
from torchtune.estimate import check_run, find_problems, plan_run
from torchtune.supervision import StepPlan, watch_run
from torchtune.training import RunReport

MODEL = "torchtune.models.smol.smollm2_135m"
SINGLE = "full_finetune_single_device"
DISTRIBUTED = "full_finetune_distributed"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("settings")


def copied(name, folder, renamed, added="", **settings):
    """A copy of a recipe with settings renamed everywhere in its text and in its config; (file, config)."""
    text = Path(load_recipe(name, folder).__file__).read_text()
    for old, new in renamed.items():
        assert old in text
        text = text.replace(f"    {old}:", f"    {new}:").replace(f"cfg.{old}", f"cfg.{new}")
    text = text.replace("    def check(self)", f"{added}    def check(self)")
    path = folder / f"mine_{len(list(folder.iterdir()))}.py"
    path.write_text(text)
    settings = {renamed.get(key, key): value for key, value in settings.items()}
    return path, write_config(name, folder, folder / "new_run", **settings)


def typed(monkeypatch, capfd, *words):
    monkeypatch.setattr(sys, "argv", ["tune", "run", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        tune.main()
    return ended.value.code, capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "old", "new", "value"),
    [
        (DISTRIBUTED, "tensor_parallel_dim", "tp_dim", 2),
        (DISTRIBUTED, "data_parallel_shard_dim", "shards", 2),
        (SINGLE, "optimizer_in_bwd", "step_in_backward", True),
        (SINGLE, "enable_activation_checkpointing", "recompute", True),
    ],
)
def test_a_renamed_setting_is_named_with_its_file(
    name,
    old,
    new,
    value,
    folder,
    monkeypatch,
    capfd,
):
    recipe, config = copied(name, folder, {old: new}, **{old: value})
    code, message = typed(monkeypatch, capfd, recipe, "--config", config, "--dry-run")
    assert code == 2
    (line,) = [line for line in message.splitlines() if line.startswith("error: ")]
    assert f"Settings has no '{old}'" in line
    assert f"'{old}: ClassVar[" in line
    assert line.startswith(f"error: {recipe}: ")
    assert "Traceback" not in message


def test_a_renamed_setting_with_a_property_works(folder):
    added = "    @property\n    def tensor_parallel_dim(self) -> int:\n        return self.tp_dim\n\n"
    recipe, config = copied(DISTRIBUTED, folder, {"tensor_parallel_dim": "tp_dim"}, added, tensor_parallel_dim=2)
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("mine_with_property", recipe)
    module = sys.modules["mine_with_property"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    cfg = load_and_check(config, [], module.recipe_main)
    assert SettingsView.of(cfg).tensor_parallel_dim == 2
    assert not SettingsView.of(cfg).can_set("tensor_parallel_dim"), "advice names what a user can type"
    assert training.ParallelDims(dp_shard=2, tp=2, world_size=4).__str__() in plan_run(cfg, 4)


def test_a_deleted_setting_may_be_a_constant(folder):
    @dataclasses.dataclass
    class Settings:
        data_parallel_replicate_dim: int = 1
        data_parallel_shard_dim: int = -1
        context_parallel_dim: int = 1
        fsdp_cpu_offload: bool = False
        fsdp_reshard_after_forward: bool = True
        tensor_parallel_plan: Any = None

    with pytest.raises(RecipeSettingsError, match=rf"{__name__.rpartition('.')[2]}\.py: .*'tensor_parallel_dim'"):
        SettingsView.of(Settings())
    Settings.tensor_parallel_dim = 1
    assert SettingsView.of(Settings()).tensor_parallel_dim == 1


def test_recipes_that_do_not_train_declare_no_more_than_they_use():
    other_recipes = [recipe for recipe in get_all_recipes() if recipe.name in ("eleuther_eval", "generate", "quantize")]
    assert len(other_recipes) == 3
    for recipe in other_recipes:
        overrides = ["prompt.user=red"] if recipe.name == "generate" else []
        main = RecipeTarget(recipe.name, path=recipe.path).load_main()
        SettingsView.of(load_and_check(recipe.configs[0].path, overrides, main))


def test_a_recipe_may_have_a_single_name_of_those_that_belong_together():
    @dataclasses.dataclass
    class Settings:
        batch_size: int = 2

    assert SettingsView.of(Settings()).declared == {"batch_size"}


def test_several_processes_without_a_mesh_are_an_error(folder):
    module = load_recipe(SINGLE, folder)
    cfg = load_and_check(write_config(SINGLE, folder, folder / "new_run"), [], module.recipe_main)
    (problem,) = find_problems(cfg, 2)
    assert "there are 2 processes" in problem
    check_run(cfg, 1)


def test_settings_of_an_older_recipe_declare_any_subset():
    cfg = OmegaConf.create({"batch_size": 3, "tensor_parallel_dim": None, "tokenizer": {"max_seq_len": 5}})
    settings = SettingsView.of(cfg)
    assert (settings.batch_size, settings.max_seq_len, settings.declared) == (3, 5, {"batch_size", "tokenizer"})
    assert settings.tensor_parallel_dim is None
    assert "mesh        1 process" in plan_run(OmegaConf.create({"model": {"_component_": MODEL}}))


def test_a_recipe_without_a_setting_lacks_the_feature_whatever_the_default_of_others():
    plan = StepPlan.of({"gradient_accumulation_steps": 4})
    assert plan == StepPlan(batch_size=1, gradient_accumulation_steps=4, epochs=1, max_steps_per_epoch=None)


@pytest.mark.parametrize(("num_steps", "max_steps"), [(None, None), (96, 3)])
def test_the_batch_of_ppo_is_the_rows_of_a_step(num_steps, max_steps):
    ppo = {"reward_and_value_model": {"_component_": MODEL}, "batch_size": 32, "num_steps": num_steps}
    plan = StepPlan.of({**ppo, "gradient_accumulation_steps": 8})
    assert plan == StepPlan(batch_size=4, gradient_accumulation_steps=8, max_steps_per_epoch=max_steps)
    assert plan.rows_per_step(data_size=2) == 64


def test_every_name_is_a_setting_of_a_shipped_recipe():
    shipped = set().union(*(settings_of_recipe(recipe) for recipe in get_all_recipes()))
    assert KNOWN_SETTINGS - shipped == {"recipe"}
    with pytest.raises(AttributeError, match="add it to KNOWN_SETTINGS"):
        _ = SettingsView({}).batchsize


def test_report_of_a_recipe_without_settings_is_refused():
    with pytest.raises(RecipeSettingsError, match="SimpleNamespace has no attribute 'cfg' after setup"):
        RunReport(SimpleNamespace())


def test_advice_is_checked_before_training_not_when_memory_is_gone():
    @dataclasses.dataclass
    class Settings:
        batch_size: int = 1
        epochs: int = 1

    throughput = supervision.Throughput()
    with (
        pytest.raises(RecipeSettingsError, match="gradient_accumulation_steps"),
        watch_run(Settings(), training.ParallelDims(), throughput, None),
    ):
        raise AssertionError("the block ran")
