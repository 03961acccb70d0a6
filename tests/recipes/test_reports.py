"""Every recipe ends in a verdict and a page, and measuring changes nothing of what is trained."""

import json
import re
import sys

import pytest
import torch

from tests.devices import DEVICE
from tests.recipes.runs import after_each_step, load_recipe, read_log, run_main, start, write_config
from tests.tiny import write_lines
from torchtune.config import load_and_check
from torchtune.reports import RunFolder, judge, write_report

LORA = "lora_finetune_single_device"
LABELLED = [{"prompt": "the cat", "completion": f"sees {i}", "label": i % 2 == 0} for i in range(8)]


def run(*how, **settings):
    """Run a recipe by its ``recipe_main``; returns its folder."""
    return RunFolder(run_main(*how, **settings)[1])


def test_measuring_draws_no_random_number_and_changes_no_loss(tmp_path):
    """Dropout draws from the global generator in every step."""
    dropout = {"_component_": "torchtune.modules.peft.LoRA", "rank": 4, "alpha": 8, "dropout": 0.3}
    settings = {"model_converters": [dropout], "max_steps_per_epoch": 4, "dataset_val": "${dataset}"}
    settings |= {"run_val_every_n_steps": 2}
    alone = start(LORA, tmp_path, **settings)  # without a report
    run_folder = run(LORA, tmp_path, **settings)
    assert dict(run_folder.curve("loss")) == alone.losses
    values = [record["val_loss"] for record in alone.records if "val_loss" in record]
    assert [value for _, value in run_folder.curve("val_loss")] == values
    assert run_folder.end["layers"]["LoRALinear"] == "8 in float32", "four projections in each of two layers"
    assert f"Attention on {DEVICE} in torch.float32" in (run_folder.path / "report.html").read_text()
    (weights,) = run_folder.path.glob("epoch_0/*.safetensors")
    assert weights.read_bytes() == (alone.output_dir / "epoch_0" / weights.name).read_bytes()


def test_losses_before_and_after_are_those_of_the_model(tmp_path):
    """The losses of rows are those of transformers' models on the tokens of the samples."""
    from transformers import AutoModelForCausalLM

    run_folder = run("full_finetune_single_device", tmp_path, epochs=2)
    recipe = start("full_finetune_single_device", tmp_path, train=False).recipe
    rows = [recipe.loader.dataset[index] for index in (0, 3, 6, 9, 13, 16, 19, 23)]
    for when, folder in (("before", tmp_path / "checkpoint"), ("after", run_folder.path / "epoch_1")):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        wanted = []
        for row in rows:
            tokens = torch.as_tensor(row["tokens"])[None]
            labels = torch.as_tensor(row["labels"])
            logits = model(tokens.long()).logits[0]
            wanted.append(torch.nn.functional.cross_entropy(logits, labels.long(), ignore_index=-100).item())
        assert list(run_folder.measured(when)["values"].values()) == pytest.approx(wanted, rel=1e-4)
    assert judge(run_folder).word == "learned"
    assert judge(run_folder).interval.pairs == 8
    for row, answer in zip(rows, run_folder.measured("after")["answers"], strict=True):
        is_label = [label != -100 for label in row["labels"]]
        first = is_label.index(True)  # the label of the last token of the prompt
        end = is_label.index(False, first)
        assert answer["prompt"] == recipe.tokenizer.decode(list(row["tokens"])[: first + 1])
        assert answer["expected"] == recipe.tokenizer.decode(list(row["labels"])[first:end])


@pytest.mark.parametrize(
    ("name", "settings", "what"),
    [
        ("dpo", {}, "loss"),
        ("dpo", {"loss": {"_component_": "torchtune.rlhf.loss.RewardLoss"}}, "loss"),
        ("dpo", {"loss": {"_component_": "torchtune.rlhf.loss.KTOLoss"}}, "loss"),
        ("grpo", {}, "reward"),
        ("ppo", {}, "reward"),
        ("knowledge_distillation", {}, "loss"),
        ("full_finetune_single_device", {"dataset__packed": True, "tokenizer__max_seq_len": 128}, "loss"),
    ],
    ids=["dpo", "reward model", "kto", "grpo", "ppo", "distillation", "packed"],
)
def test_every_method_is_measured(name, settings, what, tmp_path):
    if "KTO" in str(settings):
        source = str(write_lines(tmp_path / "labelled.jsonl", LABELLED))
        settings = settings | {"dataset": {"_component_": "torchtune.datasets.kto_dataset", "source": source}}
    is_reward_model = "RewardLoss" in str(settings)
    if is_reward_model:
        model = {"_component_": "torchtune.modules.classifier_model", "num_classes": 1}
        model |= {"base_model_path": "torchtune.models.from_hf_config", "checkpoint_dir": str(tmp_path / "checkpoint")}
        settings = settings | {"model": model}
    run_folder = run(name, tmp_path, max_steps_per_epoch=2, **settings)
    after = run_folder.measured("after")
    assert (after["what"], after["on"]) == (what, "dataset")
    assert after["values"].keys() == run_folder.measured("before")["values"].keys()
    assert None not in after["values"].values()
    pairs = judge(run_folder).interval.pairs
    assert pairs == (4 if "KTO" in str(settings) else 8) or name.startswith("full"), "KTO takes rows by twos"
    assert bool(after["answers"]) != is_reward_model
    assert [answer["prompt"] for answer in after["answers"]] == [
        answer["prompt"] for answer in run_folder.measured("before")["answers"]
    ]
    assert (run_folder.path / "report.html").read_text().count("<polyline") >= 4
    assert json.loads((run_folder.path / "report.json").read_text())["verdict"]["word"] == judge(run_folder).word


def test_a_stream_is_measured_and_goes_on_where_it_was(tmp_path):
    """The measured rows are read anew."""
    settings = {"dataset__streaming": True, "dataset__shuffle_buffer": 6, "max_steps_per_epoch": 4, "epochs": 2}
    alone = start(LORA, tmp_path, **settings)  # without a report
    run_folder = run(LORA, tmp_path, **settings)
    assert dict(run_folder.curve("loss")) == alone.losses
    assert judge(run_folder).interval.pairs == 8
    assert len(run_folder.measured("after")["answers"]) == 8


def test_with_a_cached_teacher_only_rows_that_the_run_visits_are_measured(tmp_path):
    """Its outputs are cached for these rows alone."""
    kd_loss = {"_component_": "torchtune.modules.loss.ForwardKLWithChunkedOutputLoss", "top_k": 8}
    settings = {"kd_loss": kd_loss, "teacher_cache": str(tmp_path / "kept"), "shuffle": False, "batch_size": 2}
    run_folder = run("knowledge_distillation", tmp_path, max_steps_per_epoch=3, epochs=2, **settings)
    assert judge(run_folder).interval.pairs == 6


@pytest.mark.parametrize("is_one_word", [False, True])
def test_settings_that_differ_from_the_config_are_listed(tmp_path, monkeypatch, is_one_word):
    module = load_recipe(LORA, tmp_path, None)
    config = write_config(LORA, tmp_path, tmp_path / "run")
    config.write_text(config.read_text().replace("lr: 0.01", "lr: 1e-2"))
    overrides = ["batch_size=8", "clip_grad_norm=1.0", "dataset.split=train[:16]"]
    option = [f"--config={config}"] if is_one_word else ["--config", str(config)]
    monkeypatch.setattr(sys, "argv", ["recipe", *option, *overrides])
    module.recipe_main(load_and_check(config, overrides, module.recipe_main))
    start = RunFolder(tmp_path / "run").start
    assert start["config"] == str(config)
    assert start["recipe"] == LORA
    assert start["changed"] == {
        "batch_size": [2, 8],
        "clip_grad_norm": [None, 1.0],
        "dataset.split": [None, "train[:16]"],
    }


def test_a_run_that_fails_has_a_page_that_says_why(tmp_path):
    broken = after_each_step("self.global_step == 2 and [].pop()")
    with pytest.raises(IndexError, match="pop from empty list"):
        run(LORA, tmp_path, broken)
    (folder,) = [path.parent for path in tmp_path.glob("*/report.html")]
    run_folder = RunFolder(folder)
    assert (run_folder.state, judge(run_folder).word) == ("has failed", "unfinished")
    assert "IndexError: pop from empty list" in (folder / "report.html").read_text()


def test_a_run_that_is_resumed_with_more_epochs_measures_the_same_rows(tmp_path):
    """A twentieth of the rows of the run is measured, which is more with 16 epochs than with 8."""
    stop = after_each_step("self.global_step == 2 and __import__('signal').raise_signal(2)")
    first = run(LORA, tmp_path, stop, batch_size=24, gradient_accumulation_steps=1, epochs=8)
    module = load_recipe(LORA, tmp_path, None)
    overrides = ["resume_from_checkpoint=True", "epochs=16"]
    module.recipe_main(load_and_check(first.path / "torchtune_config.yaml", overrides, module.recipe_main))
    run_folder = RunFolder(first.path)
    before = run_folder.measured("before")
    assert len(before["values"]) == 192 // 20
    assert run_folder.measured("after")["rows"] == before["rows"]
    assert judge(run_folder).interval.pairs == len(before["values"])


def test_a_resumed_run_is_measured_against_its_beginning(tmp_path):
    stop = after_each_step("self.global_step == 2 and __import__('signal').raise_signal(2)")
    first = run(LORA, tmp_path, stop, max_steps_per_epoch=4)
    assert (first.state, judge(first).word) == ("was stopped", "unfinished")
    module = load_recipe(LORA, tmp_path, None)
    config = first.path / "torchtune_config.yaml"
    module.recipe_main(load_and_check(config, ["resume_from_checkpoint=True"], module.recipe_main))
    run_folder = RunFolder(first.path)
    assert run_folder.state == "has finished"
    assert [event["event"] for event in run_folder.events] == ["start", "measured", "end", "start", "measured", "end"]
    assert judge(run_folder).interval.pairs == 8
    assert run_folder.last("trained_tokens") == sum(
        record["trained_tokens"] for record in (read_log(first.path)[1], read_log(first.path)[-1])
    )
    page = write_report(run_folder).read_text()
    assert re.search(r"<td class=\"number\">2</td><td>resumed</td>", page)
