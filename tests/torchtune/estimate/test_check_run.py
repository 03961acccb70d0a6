"""Every reason for which a run cannot start is found without starting it, and all of them at once."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.recipes.runs import load_recipe, start, write_config
from tests.tiny import CHATS, write_conversations
from torchtune import config, datasets
from torchtune.config import ConfigError, load_and_check
from torchtune.data import DataError
from torchtune.estimate import RunError, check_run, find_problems, measure_data, plan_data, plan_run
from torchtune.tokenizers import hf_tokenizer

LORA = "lora_finetune_single_device"
DISTRIBUTED = "full_finetune_distributed"
MODEL = {"vocab_size": 1024, "num_layers": 1, "num_heads": 4, "num_kv_heads": 4, "embed_dim": 32, "max_seq_len": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("check_run")


def settings(name: str, folder: Path, *overrides: str, **changes: Any) -> Any:
    module = load_recipe(name, folder)
    output = folder / "new_run"
    return load_and_check(write_config(name, folder, output, **changes), overrides, module.recipe_main)


@pytest.mark.parametrize(("name", "processes"), [(LORA, 1), (DISTRIBUTED, 4)])
def test_run_that_can_start_has_no_problem(name, processes, folder):
    cfg = settings(name, folder)
    before = set(folder.rglob("*"))
    assert find_problems(cfg, processes, thorough=True) == []
    assert set(folder.rglob("*")) == before, "nothing is written"


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        ("{_component_: torchtune.training.MuonWithAdamW, lr: 1.0e-3}", []),
        ("{_component_: torchtune.training.GroupedOptimizer, groups: [{pattern: lora_b, lr_ratio: 16}]}", []),
        (
            "{_component_: torchtune.training.GroupedOptimizer, groups: "
            "[{pattern: lora_b, optimizer: torch.optim.SGD, momentum: -1.0}]}",
            ["optimizer, group 'lora_b': SGD: Invalid momentum value: -1.0"],
        ),
    ],
)
def test_the_optimizer_of_each_group_is_tried(optimizer, said, folder):
    problems = find_problems(settings(LORA, folder, f"optimizer={optimizer}"), thorough=True)
    assert len(problems) == len(said)
    assert all(text in problem for text, problem in zip(said, problems, strict=True))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("dataset.data_files=nope/missing.jsonl", "nope/missing.jsonl"),
        ("checkpointer.checkpoint_dir=/nope", "checkpoint_dir: there is no folder /nope"),
        ("tokenizer.path=/nope", "/nope"),
        ("model.checkpoint_dir=/nope", "There is no config.json in /nope"),
        ("device=cuda:77", "device: 'cuda:77' was asked for"),
        ("model_converters=[{_component_: torchtune.modules.peft.LoRA, rank: -1}]", "rank"),
        ("output_dir=/dev/null/run", "output_dir: /dev/null/run cannot be made"),
        (
            "optimizer={_component_: torchtune.training.GroupedOptimizer, groups: [{pattern: lora_c, lr: 1.0}]}",
            "optimizer.groups[0]: the pattern 'lora_c' matches no trained parameter; nearest are layers.*",
        ),
    ],
)
def test_each_problem_is_found_alone(override, said, folder):
    (problem,) = find_problems(settings(LORA, folder, override), thorough=True)
    assert said in problem
    assert "\n" not in problem


NF4 = {"_component_": "torchtune.modules.low_precision.QuantizeBase", "block_size": 16}
INT8 = {"_component_": "torchtune.training.quantization.Int8WeightOnlyQuantizer"}


@pytest.mark.parametrize(
    ("name", "changes", "processes", "said"),
    [
        ("full_finetune_single_device", {"model_converters": [NF4]}, 1, "its base is quantized, so it is frozen and"),
        ("qat_single_device", {"quantizer__groupsize": 24}, 1, "groupsize 24 does not divide the 32 inputs of 'layers"),
        ("qat_single_device", {"quantizer": INT8}, 1, "Int8WeightOnlyQuantizer cannot be simulated in training: choos"),
        (DISTRIBUTED, {"tensor_parallel_dim": 3}, 3, "must divide the 4 query heads and the 2 key heads"),
        (DISTRIBUTED, {"tensor_parallel_dim": 2}, 3, "3 processes cannot be divided"),
        (DISTRIBUTED, {"context_parallel_dim": 3}, 3, "context_parallel_dim is 3"),
        (DISTRIBUTED, {"data_parallel_shard_dim": 3}, 4, "data_parallel_shard_dim 3"),
        (DISTRIBUTED, {"model": {"_component_": "torchtune.models.gemma2.gemma2_2b"}}, 1, "use a builder of the check"),
        (DISTRIBUTED, {"model": {"_component_": "torchtune.models.llama3_2.llama3_2_1b"}}, 1, "checkpoint has 4 heads"),
    ],
)
def test_settings_that_exclude_each_other_are_found(name, changes, processes, said, folder):
    (problem,) = find_problems(settings(name, folder, **changes), processes)
    assert said in problem


def test_an_adapter_that_would_not_be_saved_or_is_missing_is_found(folder):
    converters = [{"_component_": "torchtune.modules.peft.LoRA", "rank": 2, "alpha": 4}]
    (problem,) = find_problems(settings(DISTRIBUTED, folder, model_converters=converters))
    assert "is trained, but checkpoints would hold the base weights alone" in problem
    (problem,) = find_problems(settings(LORA, folder, model_converters=[]))
    assert "it has no adapters to train" in problem
    copied_recipe = load_recipe(
        DISTRIBUTED, folder, {"recipe_main(cfg: Settings) -> int:\n": "recipe_main(cfg: Settings) -> int:\n\n"}
    )
    path = write_config(DISTRIBUTED, folder, folder / "new_run", model_converters=converters)
    assert find_problems(load_and_check(path, [], copied_recipe.recipe_main)) == [], "a copy may save it"


def test_settings_that_a_resume_cannot_change_are_found(folder, tmp_path):
    start(LORA, folder, output_dir=tmp_path / "run", save_every_n_steps=6, log_level="INFO")
    shutil.rmtree(tmp_path / "run" / "step_12")  # as if it had been stopped
    overrides = (f"output_dir={tmp_path / 'run'}", "resume_from_checkpoint=True")
    assert find_problems(settings(LORA, folder, *overrides, save_every_n_steps=6), thorough=True) == []
    (problem,) = find_problems(settings(LORA, folder, *overrides, "optimizer.lr=5e-4"), thorough=True)
    assert "optimizer.lr was 0.01 and is 0.0005 now" in problem


def test_all_problems_are_reported_at_once(folder):
    overrides = ("checkpointer.checkpoint_dir=/nope", "dataset.data_files=/nope.jsonl", "output_dir=/dev/null/run")
    with pytest.raises(RunError, match="the run cannot start, for 3 reasons:") as caught:
        check_run(settings(LORA, folder, *overrides))
    assert len(caught.value.problems) == 3


def test_output_folder_with_a_run_is_found(folder, tmp_path):
    (tmp_path / "epoch_0").mkdir()
    (problem,) = find_problems(settings(LORA, folder, f"output_dir={tmp_path}"))
    assert "already holds a run (epoch_0)" in problem


def test_indivisible_layers_are_found(folder):
    model = {"_component_": "torchtune.models.llama3_2.llama3_2", **MODEL, "vocab_size": 1023}
    problems = find_problems(settings(DISTRIBUTED, folder, model=model, tensor_parallel_dim=2), 2)
    assert any("2 does not divide the size 1023 of tok_embeddings" in problem for problem in problems)


def test_teacher_without_the_new_tokens_is_refused(folder):
    changes = {"resize_token_embeddings": True, "tokenizer__add_tokens": ["<think>"]}
    problems = find_problems(settings("knowledge_distillation_single_device", folder, **changes), 1, thorough=True)
    assert any("teacher_checkpointer: the teacher does not know <think>" in problem for problem in problems), problems


@pytest.mark.parametrize("size", [1022, 1023])
def test_vocabulary_is_split_with_its_new_tokens(folder, size):
    """A token makes an odd vocabulary even, and an even one odd."""
    vocabulary = hf_tokenizer(str(folder / "checkpoint")).vocab_size
    tokens = [f"<{number}>" for number in range(size - vocabulary)]
    changes = {"tensor_parallel_dim": 2, "resize_token_embeddings": True, "tokenizer__add_tokens": tokens}
    problems = find_problems(settings(DISTRIBUTED, folder, **changes), 2, thorough=True)
    if size % 2 == 0:
        assert problems == []
    else:
        (problem,) = problems
        assert "2 does not divide the size 1023 of tok_embeddings" in problem
        assert "add tokens until it does (tokenizer.add_tokens" in problem


def test_experts_are_split_with_the_layers_or_refused_by_their_number(folder):
    model = {"_component_": "torchtune.models.mixtral.mixtral_8x7b"}
    sizes = {"tensor_parallel_dim": 2, "expert_parallel_dim": 2}
    problems = find_problems(settings(DISTRIBUTED, folder, model=model, **sizes), 2)
    assert not any("parallel_dim" in problem for problem in problems)
    problems = find_problems(settings(DISTRIBUTED, folder, model=model, expert_parallel_dim=3), 3)
    assert any("expert_parallel_dim is 3: it must divide the 8 experts" in problem for problem in problems)


def test_a_tensor_of_another_shape_is_found_without_reading_it(folder, tmp_path):
    described = json.loads((folder / "checkpoint" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**described, "intermediate_size": 96}))
    problems = find_problems(settings(DISTRIBUTED, folder, f"model.checkpoint_dir={tmp_path}"))
    assert "has the shape [32, 64] where the model needs [32, 96]" in problems[0]


def test_a_teacher_of_other_shapes_is_found(folder, tmp_path):
    described = json.loads((folder / "checkpoint" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**described, "intermediate_size": 96}))
    problems = find_problems(
        settings("knowledge_distillation_single_device", folder, f"teacher_model.checkpoint_dir={tmp_path}")
    )
    assert any("teacher/model.safetensors: the tensor" in problem for problem in problems), problems


@pytest.mark.parametrize("logger", ["WandBLogger", "CometLogger", "MLFlowLogger", "TrackioLogger"])
def test_a_logger_whose_package_is_missing_is_found(logger, folder, monkeypatch):
    names = {"WandBLogger": "wandb", "CometLogger": "comet_ml", "MLFlowLogger": "mlflow", "TrackioLogger": "trackio"}
    package = names[logger]
    monkeypatch.setitem(__import__("sys").modules, package, None)  # as if it were not installed
    node = {"_component_": f"torchtune.training.metric_logging.{logger}"}
    (problem,) = find_problems(settings(LORA, folder, metric_logger=node))
    assert problem.startswith(f"{logger} needs the package '{package}', which is not installed: pip install")


def test_a_device_by_a_wrong_name_is_a_mistake_of_the_config(folder):
    with pytest.raises(ConfigError, match=r"'gpu' is not a device name: use one of cpu, cuda, .* are called cuda"):
        settings(LORA, folder, "device=gpu")


@pytest.mark.parametrize("count", [24, 61])
def test_planned_rows_tokens_and_steps_are_those_of_the_data(count, folder, tmp_path):
    data = write_conversations(tmp_path / "data.jsonl", count, seed=count)
    changes = {"dataset__data_files": str(data), "gradient_accumulation_steps": 2, "epochs": 3}
    cfg = settings(DISTRIBUTED, folder, **changes)
    exact = dict(plan_data(cfg, processes=2))
    built = datasets.instantiate_dataset(cfg.dataset, config.instantiate(cfg.tokenizer))
    tokens = sum(len(row["tokens"]) for row in built)
    per_epoch = -(-count // 8)
    assert exact["data"] == f"{count} rows, {tokens:,} tokens, all tokenized to count them"
    assert exact["batch"].startswith("8 rows a step = 2 (batch_size) x 2 (accumulation) x 2 (data-parallel ranks)")
    assert exact["steps"] == f"{3 * per_epoch} = 3 epochs of {per_epoch}"
    estimated = dict(plan_data(cfg, processes=2, sample=12))
    assert estimated["data"].startswith(f"about {count} rows, ")
    remark = "tokens, estimated from the first 12 rows of each source; the run checks all rows before its first step"
    assert estimated["data"].endswith(remark)
    assert estimated["steps"] == f"about {exact['steps']}"
    sample_tokens = sum(len(built[index]["tokens"]) for index in range(12))
    assert f"{round(sample_tokens * count / 12):,} tokens" in estimated["data"]


def test_the_plan_says_which_rows_of_the_validation_are_trained_on(folder, tmp_path):
    training = write_conversations(tmp_path / "data.jsonl", 20)
    lines = training.read_text().splitlines(keepends=True)
    (tmp_path / "some.jsonl").write_text("".join(lines[:3]))
    write_conversations(tmp_path / "others.jsonl", 3, seed=7)
    notes = {}
    for name in ("some", "others"):
        validation = {**CHATS, "source": str(tmp_path / f"{name}.jsonl")}
        cfg = settings(LORA, folder, dataset__data_files=str(training), dataset_val=validation, run_val_every_n_steps=2)
        notes[name] = dict(plan_data(cfg))["validation"].partition(", all tokenized to count them")[2]
    assert notes["some"].startswith("; all of its 3 rows are training data, too")
    assert notes["others"] == ""


def test_rows_that_cannot_be_trained_on_are_named(folder, tmp_path):
    data = tmp_path / "data.jsonl"
    write_conversations(data, 5)
    data.write_text(data.read_text() + '{"messages": []}\n')
    cfg = settings(LORA, folder, dataset__data_files=str(data))
    with pytest.raises(DataError, match="row 5"):
        plan_data(cfg)


def test_the_plan_counts_rows_of_which_the_chat_template_leaves_out_a_text(folder, tmp_path):
    data = write_conversations(tmp_path / "data.jsonl", 5)
    turns = [{"role": "user", "content": "red"}, {"role": "assistant", "content": "cat", "reasoning_content": "why"}]
    data.write_text(data.read_text() + json.dumps({"messages": turns}) + "\n")
    plan = dict(plan_data(settings(LORA, folder, dataset__data_files=str(data))))
    assert plan["data"].endswith("; the chat template drops the reasoning of 1 of 6 rows")


def test_the_plan_counts_rows_that_are_left_out_or_truncated(folder, tmp_path):
    data = write_conversations(tmp_path / "data.jsonl", 5)
    data.write_text(data.read_text() + '{"messages": []}\n')
    changes = {"dataset__data_files": str(data), "dataset__on_bad_row": "skip"}
    train = measure_data(settings(LORA, folder, **changes)).train
    built = datasets.instantiate_dataset(*built_from(settings(LORA, folder, **changes)))
    assert train.longest == max(len(row["tokens"]) for row in built)
    assert train.text.endswith("; 1 rows cannot be trained on and are left out")
    cut = measure_data(settings(LORA, folder, "tokenizer.max_seq_len=36", **changes)).train
    assert cut.longest == 36
    assert re.search(r"; \d rows have max_seq_len=36 tokens or are truncated to it$", cut.text)
    packed = measure_data(settings(LORA, folder, "dataset.packed=True", "tokenizer.max_seq_len=128", **changes)).train
    assert train.longest < packed.longest <= 128


def built_from(cfg):
    return cfg.dataset, config.instantiate(cfg.tokenizer)


def test_a_row_that_the_model_cannot_read_is_found_before_the_run(tmp_path):
    data = write_conversations(tmp_path / "long.jsonl", 3)
    turns = [{"role": "user", "content": "red"}, {"role": "assistant", "content": "the cat " * 60}]
    data.write_text(data.read_text() + json.dumps({"messages": turns}) + "\n")
    cfg = settings(LORA, tmp_path, "tokenizer.max_seq_len=null", dataset__data_files=str(data))
    file = tmp_path / "checkpoint" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_position_embeddings": 120}))
    for start_or_plan in (plan_data, load_recipe(LORA, tmp_path).recipe_main):
        with pytest.raises(
            DataError, match=rf"row 3: it has more tokens than the 120 that the model.*{data}, line 4\)"
        ):
            start_or_plan(cfg)


def test_data_of_the_hub_are_not_fetched(folder):
    cfg = settings(LORA, folder, dataset={"_component_": "torchtune.datasets.alpaca_cleaned_dataset"})
    assert find_problems(cfg) == []
    lines = dict(plan_data(cfg))
    assert "yahma/alpaca-cleaned is fetched from the hub when the run starts" in lines["data"]
    assert lines["steps"] == "unknown until the data are read"


def test_plan_shows_mesh_conversions_and_tokens(folder):
    cfg = settings(LORA, folder, "tokenizer.max_seq_len=64")
    text = plan_run(cfg)
    assert "mesh        1 process, device cpu\n" in text
    assert "converted   LoRA: " in text
    assert text.endswith("micro-batch 2 x 64 = 128 tokens at most")
    assert plan_run(cfg, length=33).endswith("micro-batch 2 x 33 = 66 tokens at most")
    guessed = plan_run(settings(LORA, folder, "tokenizer.max_seq_len=null"))
    assert guessed.endswith("tokens (tokenizer.max_seq_len is not set, so this is a guess)")
    assert "of weights" in plan_run(SimpleNamespace(model=cfg.model, dtype="fp32"))


def test_the_plan_says_that_the_warmup_is_too_long(folder, caplog):
    plan_data(settings(LORA, folder, lr_scheduler__num_warmup_steps=100))
    assert "a warmup of 100 steps is as long as the run's 12 steps or longer" in caplog.text
