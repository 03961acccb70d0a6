"""What a run says before and after: true numbers, and commands that work when they are typed."""

import json
import re
import shlex
import signal

import pytest
import torch

from tests.recipes.runs import after_each_step, read_log, run_main, start
from torchtune._recipe_registry import find_recipe
from torchtune.config import RecipeSettingsError, SettingsView, load_and_check
from torchtune.supervision import StepPlan, explain_no_validation
from torchtune.training.parallel import checksum_trained

LORA, FULL = "lora_finetune_single_device", "full_finetune_single_device"


def run(name, folder, caplog, changes=None, **settings):
    """Run a recipe by its ``recipe_main``; returns its exit code, what it said and where it wrote."""
    caplog.clear()
    with caplog.at_level("INFO", logger="torchtune"):
        code, output_dir = run_main(name, folder, changes, log_level="INFO", **settings)
    return code, "\n".join(caplog.messages), output_dir


def test_run_logs_its_summary_its_result_and_the_next_command(tmp_path, caplog, tune):
    code, log, output = run(LORA, tmp_path, caplog, gradient_accumulation_steps=3, epochs=2)
    assert code == 0
    assert "model       from_hf_config, weights of " in log
    assert re.search(r"parameters  4,096 of 32,\d+ are trained", log)  # 14 adapters of rank 4, counted by hand below
    assert 4096 == 2 * 4 * ((32 + 32) * 2 + (32 + 16) * 2 + (32 + 64) * 3)
    assert re.search(r"data        24 rows, [\d,]+ tokens\n", log)
    assert "batch       6 rows a step = 2 (batch_size) x 3 (accumulation)\n" in log
    assert "steps       8 = 2 epochs of 4\n" in log
    assert f"settings    {output}/torchtune_config.yaml" in log
    assert load_and_check(output / "torchtune_config.yaml", []).batch_size == 2
    assert "resolved config" not in log
    losses = [record["loss"] for record in read_log(output) if "loss" in record]
    assert f"loss        {losses[0]:.4f} at step 1, {losses[-1]:.4f} at step 8\n" in log
    assert losses[-1] < losses[0]
    assert f"result      {output}/epoch_1, a Hugging Face model with the adapter merged" in log
    assert "NOTHING WAS TRAINED" not in log
    (command,) = re.findall(r"ask it +tune (.*)", log)
    assert tune(*shlex.split(command), "max_new_tokens=2").code == 0
    assert tune("report", output).code == 0
    assert 0 < json.loads((output / "report.json").read_text())["estimated_gib"] < 0.01
    assert "estimate of its tensors" in (output / "report.html").read_text()


def test_runs_on_rewards_are_summarized_by_their_reward(tmp_path, caplog):
    """Not by a loss that is near 0 whatever they are worth; and what makes all of them worth the same is said."""
    _, log, output = run("ppo_full_finetune_single_device", tmp_path, caplog, max_steps_per_epoch=3)
    rewards = [record["rewards/total"] for record in read_log(output)]
    assert f"  reward      {rewards[0]:.4f} at step 1, {rewards[-1]:.4f} at step 3\n" in log
    assert "  loss  " not in log
    assert "All 8 answers get reward_penalty (1 times in a row now), of which 8 have not ended" in log, (
        "before training"
    )


def test_a_run_that_is_stopped_says_how_to_go_on(tmp_path, caplog, tune):
    stop = after_each_step("self.global_step == 2 and __import__('signal').raise_signal(2)")
    code, log, output = run(FULL, tmp_path, caplog, stop, max_steps_per_epoch=3)
    assert code == 128 + signal.SIGINT
    assert "Stopped after 2 steps in " in log
    (command,) = re.findall(r"go on with +tune (.*)", log)
    assert f"{FULL}_changed.py --config" in command, "a copy of a recipe goes on with itself, whatever its config says"
    caplog.clear()
    with caplog.at_level("INFO", logger="torchtune"):
        assert tune(*shlex.split(command)).code == 0
    assert "steps       3 = 1 epoch of 3, from step 2" in caplog.text
    assert (output / "epoch_0").is_dir()


@pytest.mark.parametrize("name", [LORA, FULL])
def test_a_run_that_trains_nothing_is_warned_of(name, tmp_path, caplog):
    validation = {"dataset_val": "${dataset}", "run_val_every_n_steps": 3}
    run(name, tmp_path, caplog, optimizer__lr=0.0, max_steps_per_epoch=2, **validation)
    assert caplog.messages[-1].startswith("NOTHING WAS TRAINED: no trained parameter differs")
    assert caplog.records[-1].levelname == "WARNING"
    assert "dataset_val: it is never measured: run_val_every_n_steps is 3 and the run has 2 steps" in caplog.text


def test_a_batch_larger_than_the_data_is_warned_of(tmp_path, caplog):
    _, log, _ = run(LORA, tmp_path, caplog, batch_size=40, gradient_accumulation_steps=2)
    short = "an epoch has only 24 rows or packs, one incomplete step: set batch_size to at most 12"
    assert f"batch       80 rows a step = 40 (batch_size) x 2 (accumulation); {short}\n" in log
    (warned,) = [record for record in caplog.records if record.getMessage() == f"The batch has 80 rows, but {short}."]
    assert warned.levelname == "WARNING"


@pytest.mark.parametrize(
    ("accumulation", "ranks", "examples", "advice"),
    [
        (1, 1, 400, None),  # fills a step exactly
        (1, 1, None, None),  # a stream
        (1, 1, 399, "batch_size to at most 399"),
        (4, 2, 1599, "batch_size to at most 199"),
        (4, 2, 7, "batch_size and gradient_accumulation_steps lower"),
    ],
)
def test_an_epoch_of_an_incomplete_step_has_advice(accumulation, ranks, examples, advice):
    plan = StepPlan(batch_size=400, gradient_accumulation_steps=accumulation)
    sentence = plan.explain_short_epoch(ranks, examples)
    if advice is None:
        assert sentence is None
    else:
        assert sentence.endswith(f"one incomplete step: set {advice}")


def test_a_best_validation_without_a_validation_is_refused():
    cfg = SettingsView({"dataset_val": {"_component_": "a.b"}, "run_val_every_n_steps": 5, "keep_best": "val_loss"})
    assert explain_no_validation(cfg, 5) is None
    with pytest.raises(RecipeSettingsError, match="keep_best: there would be no validation to compare"):
        explain_no_validation(cfg, 4)


def test_only_the_last_save_of_adapters_alone_is_an_adapter(tmp_path, caplog):
    _, log, output = run(LORA, tmp_path, caplog, save_adapter_weights_only=True, max_steps_per_epoch=2)
    assert f"result      {output}/epoch_0, an adapter in PEFT's layout for {tmp_path / 'checkpoint'}" in log
    assert f"ask it      tune chat --model {tmp_path / 'checkpoint'} --adapter {output}/epoch_0" in log


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_bit_of_any_trained_parameter_counts(dtype):
    torch.manual_seed(0)
    base = torch.randn(100, dtype=dtype)
    model = torch.nn.Module()
    model.trained = torch.nn.ParameterList([torch.nn.Parameter(base[3:40].clone()), torch.nn.Parameter(base[41:78])])
    model.frozen = torch.nn.Parameter(torch.randn(4, dtype=dtype), requires_grad=False)
    before = checksum_trained(model)
    model.frozen.data[0] += 1
    assert checksum_trained(model) == before
    for parameter in model.trained:
        for index in (0, 20, 36):
            old = parameter.data[index].clone()
            parameter.data[index] = torch.nextafter(old, old.new_tensor(float("inf")))
            assert checksum_trained(model) != before
            parameter.data[index] = old
            assert checksum_trained(model) == before


def test_state_that_a_resume_could_not_restore_is_refused_before_training(tmp_path):
    changes = {'            "best": self.best,\n': '            "best": self.best,\n            "best_loss": 5.0,\n'}
    with pytest.raises(RecipeSettingsError, match="training_state: 'best_loss' is a float, which"):
        start("full_finetune_single_device", tmp_path, train=False, changes=changes)


def test_copied_recipes_whose_report_reads_their_attributes_have_one(tmp_path, caplog):
    explicit = re.search(
        r"        with recipe\.report as report:\n.*?\n(?=    finally)", find_recipe(FULL).read_text(), re.DOTALL
    ).group()
    former = "        with training.RunReport(recipe) as report:\n            return report.end(recipe.train())\n"
    _, log, output = run(FULL, tmp_path, caplog, {explicit: former}, max_steps_per_epoch=2)
    assert "Finished 2 steps" in log
    events = [json.loads(line) for line in (output / "logs" / "run.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["start", "measured", "measured", "end"]
