"""``tune import`` reads configs of Axolotl, TRL and LLaMA-Factory, and loses no key of them."""

import ast
import importlib.util
import json
from pathlib import Path

import pytest
import yaml

from torchtune._cli.import_config import ImportedConfig, read_tables

AXOLOTL = """
base_model: unsloth/Llama-3.2-1B-Instruct
load_in_4bit: true
datasets:
  - path: own/chats
    type: chat_template
    field_messages: conversations
    message_property_mappings: {role: from, content: value}
    split: "train[:20%]"
    roles_to_train: [assistant]
  - {path: own/alpaca, type: alpaca}
adapter: qlora
lora_r: 32
lora_alpha: 16
lora_target_modules: [gate_proj, q_proj, o_proj]
sequence_len: 2048
sample_packing: true
wandb_project: mine
wandb_entity:
micro_batch_size: 3
gradient_accumulation_steps: 4
num_epochs: 2
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 2e-4
warmup_steps: 10
bf16: auto
tf32: false
gradient_checkpointing: unsloth
flash_attention: true
warmup_ratio: 0.1
plugins: [axolotl.integrations.liger.LigerPlugin]
"""
TRL = """
model_name_or_path: own/model-of-tomorrow
dataset_name: {file}
learning_rate: 1.0e-4
lr_scheduler_type: constant_with_warmup
use_peft: true
lora_target_modules: all-linear
packing: true
max_steps: 20
report_to: tensorboard
bf16: true
assistant_only_loss: true
eval_strategy: steps
chat_template_path: mine.jinja
"""
FACTORY = """
model_name_or_path: Qwen/Qwen3-0.6B
stage: sft
finetuning_type: full
dataset: chats,identity
dataset_dir: {folder}
template: qwen3
cutoff_len: 1024
learning_rate: 1.0e-5
num_train_epochs: 3.0
max_grad_norm: 0
per_device_train_batch_size: 1
deepspeed: examples/deepspeed/ds_z3_config.json
overwrite_cache: true
"""


@pytest.fixture
def convert(tune, tmp_path, monkeypatch):
    """Import a config's text; return ours and what was printed."""
    monkeypatch.chdir(tmp_path)

    def run(text, *options):
        Path("theirs.yaml").write_text(text)
        Path("theirs_torchtune.yaml").unlink(missing_ok=True)
        result = tune("import", "theirs.yaml", *options)
        assert result.code == 0, result.err
        assert "well-formed" in tune("validate", "theirs_torchtune.yaml").out
        return yaml.safe_load(Path("theirs_torchtune.yaml").read_text()), result.out

    return run


def write_rows(path, column="chats"):
    turns = [{"role": "user", "content": "red"}, {"role": "assistant", "content": "blue"}]
    path.write_text(json.dumps({column: turns}) + "\n")
    return path


def test_axolotl_config_is_converted(convert):
    converted, report = convert(AXOLOTL)
    assert converted["recipe"] == "lora_finetune_single_device"
    assert converted["model_converters"] == [
        {"_component_": "torchtune.modules.low_precision.QuantizeBase"},
        {
            "_component_": "torchtune.modules.peft.LoRA",
            "rank": 32,
            "alpha": 16,
            "target_modules": ["w1", "q_proj", "output_proj"],
        },
    ]
    folder = "/tmp/Llama-3.2-1B-Instruct"
    assert converted["model"] == {"_component_": "torchtune.models.from_hf_config", "checkpoint_dir": folder}
    assert (converted["tokenizer"]["path"], converted["checkpointer"]["checkpoint_dir"]) == (folder, folder)
    chats, alpaca = converted["dataset"]
    assert chats == {
        "_component_": "torchtune.datasets.chat_dataset",
        "source": "own/chats",
        "split": "train[:20%]",
        "conversation_column": "conversations",
        "conversation_style": "sharegpt",
        "packed": True,
        "masking_strategy": "train_on_assistant",
    }
    assert alpaca["_component_"] == "torchtune.datasets.alpaca_dataset"
    assert alpaca["masking_strategy"] == "train_on_assistant", "their default, not that of our builder"
    assert (converted["batch_size"], converted["gradient_accumulation_steps"], converted["epochs"]) == (3, 4, 2)
    assert converted["optimizer"] == {"_component_": "torchao.optim.AdamW8bit", "weight_decay": 0.0, "lr": 2e-4}
    assert converted["lr_scheduler"]["num_warmup_steps"] == 10
    assert converted["lr_scheduler"]["_component_"].endswith("get_cosine_schedule_with_warmup")
    assert converted["tokenizer"]["max_seq_len"] == 2048
    assert converted["dtype"] is None
    assert converted["enable_activation_checkpointing"] is True
    assert converted["metric_logger"]["_component_"].endswith("WandBLogger")
    assert converted["metric_logger"]["project"] == "mine"
    assert converted["clip_grad_norm"] == 1.0, "the default of their trainer"
    left = report.partition("Without counterpart:")[2].partition("No setting is needed:")[0]
    assert "  warmup_ratio: warmup_steps comes first" in report
    assert "  plugins: " in left
    assert "roles_to_train" not in left, "the assistant's turns are trained on here, too"
    assert "flash_attention: " not in left
    assert "tune download unsloth/Llama-3.2-1B-Instruct --output-dir /tmp/Llama-3.2-1B-Instruct" in report


def test_trl_config_is_converted(convert, tmp_path):
    converted, report = convert(TRL.format(file=write_rows(tmp_path / "rows.jsonl")))
    assert converted["dataset"] == {
        "_component_": "torchtune.datasets.chat_dataset",
        "source": str(tmp_path / "rows.jsonl"),
        "conversation_column": "chats",
        "conversation_style": "openai",
        "packed": True,
        "masking_strategy": "train_on_assistant",
        "split": "train",
    }
    (lora,) = converted["model_converters"]
    assert (lora["rank"], lora["alpha"], lora["dropout"]) == (16, 32, 0.05)
    assert lora["target_modules"] == ["*_proj", "w?"]
    assert (converted["max_steps"], converted["epochs"]) == (20, 3)
    assert converted["lr_scheduler"]["_component_"].endswith("get_constant_schedule_with_warmup")
    assert converted["metric_logger"]["_component_"].endswith("TensorBoardLogger")
    assert converted["dtype"] == "bf16"
    assert converted["batch_size"] == 8
    assert "  chat_template_path: not known" in report
    assert "  eval_strategy: set dataset_val, and run_val_every_n_steps=1" in report, "logging_steps is their default"


SWIFT = """
model: Qwen/Qwen3-0.6B
tuner_type: lora
dataset: [own/chats, "own/alpaca:en"]
split_dataset_ratio: 0.01
torch_dtype: bfloat16
lora_rank: 16
target_modules: [all-linear]
modules_to_save: [embed_tokens]
num_train_epochs: 1
learning_rate: 1e-4
warmup_ratio: 0.05
lr_scheduler_type: cosine
neftune_noise_alpha: 5
packing: true
loss_scale: last_round
eval_steps: 50
save_steps: 100
max_length: 2048
attn_impl: flash_attention_2
streaming: true
"""


def test_default_of_lora_changes_no_other_converter_of_a_full_run(convert):
    # TRL has defaults of LoRA, which a run of all weights does not use.
    converted, _ = convert("model_name_or_path: own/model\ndataset_name: own/rows\nneftune_noise_alpha: 5\n")
    assert converted["recipe"] == "full_finetune_single_device"
    assert converted["model_converters"] == [{"_component_": "torchtune.modules.NEFTune", "alpha": 5.0}]


def test_long_context_settings_of_axolotl_are_converted(convert):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    fields = {"max_position_embeddings": 131072, "rope_scaling": scaling}
    settings = yaml.safe_dump({"overrides_of_model_config": fields, "tiled_mlp": True})
    converted, _ = convert(AXOLOTL + settings)
    assert converted["model"]["config_overrides"] == fields
    assert converted["model_converters"][0] == {"_component_": "torchtune.modules.TiledMLP"}


def test_swift_config_is_converted(convert):
    converted, report = convert(SWIFT)
    assert "ms-swift config" in report
    chats, alpaca = converted["dataset"]
    assert (chats["source"], chats["packed"], chats["masking_strategy"]) == ("own/chats", True, "train_on_last")
    assert (alpaca["source"], alpaca["name"], alpaca["split"]) == ("own/alpaca", "en", "train[:99%]")
    noise, lora = converted["model_converters"]
    assert noise == {"_component_": "torchtune.modules.NEFTune", "alpha": 5.0}
    assert (lora["rank"], lora["alpha"], lora["train_modules"]) == (16, 32, ["tok_embeddings"])
    assert converted["lr_scheduler"]["warmup_ratio"] == 0.05
    assert (converted["optimizer"]["weight_decay"], converted["optimizer"]["betas"]) == (0.1, [0.9, 0.95])
    assert (converted["batch_size"], converted["gradient_accumulation_steps"]) == (1, 16)
    assert (converted["dtype"], converted["tokenizer"]["max_seq_len"]) == ("bf16", 2048)
    assert "  streaming: set dataset.streaming" in report
    assert "attn_impl" in report.partition("No setting is needed:")[2]


def test_number_of_rows_in_the_name_of_a_swift_dataset_is_a_part_of_its_split(convert):
    converted, report = convert(SWIFT.replace("own/chats", "own/chats#500"))
    assert (converted["dataset"][0]["source"], converted["dataset"][0]["split"]) == ("own/chats", "train[:500]")
    assert "  dataset own/chats: the first 500 rows, not random ones" in report
    assert "  split_dataset_ratio: set dataset.split and dataset_val.split to parts" in report


def test_rows_that_are_held_out_for_validation_leave_the_training_data(convert):
    converted, report = convert(AXOLOTL.replace('"train[:20%]"', "train") + "val_set_size: 0.05\nevals_per_epoch: 4\n")
    assert [node["split"] for node in converted["dataset"]] == ["train[:95%]", "train[:95%]"]
    assert [node["split"] for node in converted["dataset_val"]] == ["train[95%:]", "train[95%:]"]
    assert all(node["masking_strategy"] == "train_on_assistant" for node in converted["dataset_val"])
    assert converted["run_val_every_n_steps"] == 1 / 8, "4 times in each of 2 epochs"
    assert "  val_set_size: the last 5% of the rows are held out, not random ones" in report
    assert "Without counterpart" in report
    assert "val_set_size" not in report.partition("Without counterpart:")[2].partition("Done in another way:")[0]


def test_number_of_rows_is_held_out(convert):
    converted, _ = convert(FACTORY.format(folder=".") + "val_size: 200\neval_strategy: steps\neval_steps: 25\n")
    assert converted["dataset"][0]["split"] == "train[:-200]"
    assert converted["dataset_val"][0]["split"] == "train[-200:]"
    assert converted["run_val_every_n_steps"] == 25


@pytest.mark.parametrize(
    ("lines", "interval"),
    [
        ("eval_strategy: epoch", "epoch"),
        ("evaluation_strategy: epoch", "epoch"),
        ("eval_strategy: steps\neval_steps: 7", 7),
        ("eval_strategy: steps\nlogging_steps: 3", 3),
        ("eval_strategy: steps\neval_steps: 0.25", 0.25),
        ("do_eval: true", "epoch"),
        ("", "epoch"),
    ],
)
def test_intervals_of_validation_are_converted(convert, lines, interval):
    converted, report = convert(FACTORY.format(folder=".") + f"val_size: 0.1\n{lines}\n")
    assert converted["run_val_every_n_steps"] == interval
    assert converted["dataset_val"][0]["split"] == "train[90%:]"
    assert ("  eval_steps: not set: validation runs once per epoch" in report) == (lines == "")


@pytest.mark.parametrize("strategy", ["no", "'no'"])
def test_run_without_validation_keeps_all_rows(convert, strategy):
    converted, report = convert(FACTORY.format(folder=".") + f"val_size: 0.1\neval_strategy: {strategy}\n")
    assert "dataset_val" not in converted
    assert "split" not in converted["dataset"][0]
    assert "  eval_strategy: nothing is validated" in report


def test_separate_validation_data_are_converted(convert):
    lines = "test_datasets: [{path: own/held_out, type: alpaca, split: test}]\neval_steps: 10\n"
    lines += "early_stopping_patience: 3\nload_best_model_at_end: true\nmetric_for_best_model: eval_loss\n"
    converted, _ = convert(AXOLOTL + lines)
    assert converted["dataset_val"]["source"] == "own/held_out"
    assert converted["dataset_val"]["split"] == "test"
    assert converted["early_stopping_patience"] == 3
    assert converted["keep_best"] == "val_loss"


@pytest.mark.parametrize("lines", ["", "eval_strategy: no\n"])
def test_settings_that_need_validation_are_listed_where_nothing_is_validated(convert, lines):
    lines += "early_stopping_patience: 3\nload_best_model_at_end: true\nmetric_for_best_model: eval_loss\n"
    converted, report = convert(AXOLOTL + lines)
    assert "early_stopping_patience" not in converted
    reason = "nothing is validated" if "eval_strategy" in lines else "it needs validation data"
    for key in ("early_stopping_patience", "load_best_model_at_end", "metric_for_best_model"):
        assert f"  {key}: {reason}" in report


def test_test_split_of_trl_is_validation_data(convert):
    converted, _ = convert(TRL.format(file="own/chats").replace("steps", "epoch"))
    assert (converted["dataset"]["split"], converted["dataset_val"]["split"]) == ("train", "test")


def test_rows_that_cannot_be_split_are_left_to_the_user(convert):
    _, report = convert(AXOLOTL + "val_set_size: 0.05\n")  # which has the split train[:20%]
    assert "  val_set_size: set dataset.split and dataset_val.split to parts" in report


@pytest.mark.parametrize(
    ("line", "masking", "reason"),
    [
        ("roles_to_train: [gpt]", "train_on_assistant", None),
        ("roles_to_train: [assistant, user]", "train_on_all", None),
        ("roles_to_train: [user]", "train_on_assistant", "roles_to_train: masking_strategy trains on the assistant"),
        ("train_on_eos: turn", "train_on_assistant", None),
        ("train_on_eos: all", "train_on_assistant", "train_on_eos: the end of each trained turn is trained on"),
        ("message_field_training: train", "train_on_assistant", None),
        ("message_field_training: learn", "train_on_assistant", "message_field_training: rename 'learn' of the turns"),
        (
            "message_field_training_detail: detail",
            "train_on_assistant",
            "message_field_training_detail: write the content of the turn as a list of texts",
        ),
    ],
)
def test_turns_that_are_trained_on_are_converted(convert, line, masking, reason):
    converted, report = convert(AXOLOTL.replace("roles_to_train: [assistant]", line))
    assert converted["dataset"][0]["masking_strategy"] == masking
    left = report.partition("Without counterpart:")[2].partition("No setting is needed:")[0]
    if reason is None:
        assert "datasets.0" not in left
    else:
        assert f"  datasets.0.{reason}" in left


def test_column_of_a_file_may_have_spaces_in_its_name(convert, tmp_path):
    converted, _ = convert(TRL.format(file=write_rows(tmp_path / "rows.jsonl", "all chats")))
    assert converted["dataset"]["conversation_column"] == "all chats"


def test_llama_factory_config_is_converted(convert, tmp_path):
    write_rows(tmp_path / "rows.jsonl")
    described = {"chats": {"file_name": "rows.jsonl", "formatting": "sharegpt", "columns": {"messages": "chats"}}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(described))
    converted, report = convert(FACTORY.format(folder=tmp_path))
    assert converted["recipe"] == "full_finetune_distributed"
    assert "  several devices: FSDP2 shards" in report
    chats, identity = converted["dataset"]
    assert (chats["conversation_column"], chats["conversation_style"]) == ("chats", "openai")
    assert identity["source"] == "identity"
    assert "model_converters" not in converted
    assert converted["clip_grad_norm"] is None, "0 clips nothing there"
    assert converted["epochs"] == 3
    assert converted["enable_activation_checkpointing"] is True, "their default"
    assert "  dataset identity: " in report
    assert "  template: set tokenizer.chat_template" in report


@pytest.mark.parametrize(
    ("base", "lines", "setting", "value"),
    [
        (FACTORY, ["train_on_prompt: false", "mask_history: true"], "masking_strategy", "train_on_last"),
        (FACTORY, ["train_on_prompt: true", "mask_history: false"], "masking_strategy", "train_on_all"),
        (FACTORY, ["train_on_prompt: false", "mask_history: false"], "masking_strategy", "train_on_assistant"),
        (FACTORY, ["mask_history: false"], "masking_strategy", "train_on_assistant"),
        (FACTORY, ["fsdp: full_shard", 'deepspeed: ""'], "recipe", "full_finetune_distributed"),
        (AXOLOTL, ["lora_target_modules: [q_proj]", "lora_target_linear: true"], "target_modules", ["*_proj", "w?"]),
        (AXOLOTL, ["lora_modules_to_save: [embed_tokens, lm_head]"], "train_modules", ["tok_embeddings", "output"]),
    ],
)
def test_the_order_of_keys_that_decide_one_setting_does_not_matter(tmp_path, base, lines, setting, value):
    keys = tuple(line.partition(":")[0] for line in lines)
    base_lines = [line for line in base.splitlines() if not line.startswith(keys)]
    path = tmp_path / "theirs.yaml"
    for ordered in (lines, lines[::-1]):
        path.write_text("\n".join([*ordered, *base_lines]).replace("{folder}", "data"))
        converted = ImportedConfig(path).data
        datasets = converted["dataset"] if isinstance(converted["dataset"], list) else [converted["dataset"]]
        assert {**converted, **datasets[0], **converted.get("model_converters", [{}])[-1]}[setting] == value


def test_keys_that_exclude_each_other_in_llama_factory_are_refused(tune, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "theirs.yaml"
    path.write_text("mask_history: true\ntrain_on_prompt: true\n" + FACTORY.format(folder="data"))
    result = tune("import", path)
    assert result.code == 2
    assert "train_on_prompt and mask_history exclude each other in llama-factory: choose one" in result.err


SCHEDULES = "torchtune.training.lr_schedulers."


@pytest.mark.parametrize(
    ("lines", "schedule"),
    [
        (
            "lr_scheduler_type: warmup_stable_decay\nwarmup_steps: 0.1\n"
            "lr_scheduler_kwargs: {num_decay_steps: 40, decay_type: 1-sqrt, min_lr_ratio: 0.05}",
            {
                "_component_": SCHEDULES + "get_wsd_schedule",
                "num_warmup_steps": 0,
                "warmup_ratio": 0.1,
                "num_decay_steps": 40,
                "decay_type": "1-sqrt",
                "min_lr_ratio": 0.05,
            },
        ),
        (
            "lr_scheduler_type: cosine_with_min_lr\nwarmup_ratio: 0.03\nlr_scheduler_kwargs: {min_lr_rate: 0.1}",
            {
                "_component_": SCHEDULES + "get_cosine_schedule_with_warmup",
                "num_warmup_steps": 0,
                "warmup_ratio": 0.03,
                "min_lr_ratio": 0.1,
            },
        ),
        (
            "lr_scheduler_type: polynomial\nwarmup_steps: 7\nlr_scheduler_kwargs: {lr_end: 1.0e-6, power: 2.0}",
            {
                "_component_": SCHEDULES + "get_polynomial_decay_schedule_with_warmup",
                "num_warmup_steps": 7,
                "lr_end": 1e-6,
                "power": 2.0,
            },
        ),
        (
            "lr_scheduler_type: inverse_sqrt\nlr_scheduler_kwargs: {timescale: 500}",
            {"_component_": SCHEDULES + "get_inverse_sqrt_schedule", "num_warmup_steps": 0, "timescale": 500},
        ),
    ],
)
def test_schedules_are_converted_with_their_arguments(convert, tmp_path, lines, schedule):
    base = TRL.format(file=write_rows(tmp_path / "rows.jsonl")).replace("lr_scheduler_type: constant_with_warmup\n", "")
    converted, _ = convert(base + lines)
    assert converted["lr_scheduler"] == schedule


def test_arguments_that_a_schedule_lacks_are_listed(convert, tmp_path):
    kwargs = "lr_scheduler_kwargs: {timescale: 500, min_lr: 1.0e-6}"
    converted, report = convert(TRL.format(file=write_rows(tmp_path / "rows.jsonl")) + kwargs)
    assert converted["lr_scheduler"].keys() == {"_component_", "num_warmup_steps"}
    assert "  lr_scheduler_kwargs.min_lr: no schedule has such an argument" in report
    assert (
        "  lr_scheduler.timescale: torchtune.training.lr_schedulers.get_constant_schedule_with_warmup has no" in report
    )


@pytest.mark.parametrize(
    ("base", "lines", "setting", "value"),
    [
        (TRL, "save_strategy: epoch\nsave_steps: 50", "save_every_n_steps", "epoch"),
        (TRL, "save_strategy: steps\nsave_steps: 50", "save_every_n_steps", 50),
        (TRL, "save_steps: 0.25", "save_every_n_steps", 0.25),
        (TRL, "loss_type: dft\nlabel_smoothing_factor: 0.1", "loss.reweighting", "dft"),
        (TRL, "loss_type: nll\nlabel_smoothing_factor: 0.1", "loss.label_smoothing", 0.1),
        (FACTORY, "use_dft_loss: true", "loss.reweighting", "dft"),
        (FACTORY, "use_eaft_loss: true\nuse_dft_loss: false\neaft_alpha: 0.5", "loss.reweighting", "eaft"),
        (FACTORY, "eaft_alpha: 0.5", "loss.eaft_alpha", 0.5),
        (FACTORY.replace("sft", "dpo"), "pref_ftx: 0.5", "loss.rpo_alpha", 0.5),
        (AXOLOTL, "cosine_min_lr_ratio: 0.2", "lr_scheduler.min_lr_ratio", 0.2),
        (AXOLOTL + "rl: dpo\n", "rpo_alpha: 0.5", "loss.rpo_alpha", 0.5),
        (AXOLOTL, "max_steps: -1", "max_steps", None),
    ],
)
def test_losses_and_intervals_are_converted(convert, tmp_path, base, lines, setting, value):
    text = base.replace("{file}", str(write_rows(tmp_path / "rows.jsonl"))).replace("{folder}", "data")
    converted, _ = convert(text + lines)
    section, _, name = setting.rpartition(".")
    assert (converted[section] if section else converted)[name] == value


def test_argument_that_the_loss_lacks_is_listed(convert, tmp_path):
    converted, report = convert(FACTORY.format(folder="data") + "pref_beta: 0.2")
    assert converted["loss"].keys() == {"_component_"}
    assert "  loss.beta: torchtune.modules.loss.LinearCrossEntropyLoss has no such argument" in report


def test_preference_configs_are_converted_to_dpo(convert):
    converted, _ = convert(FACTORY.format(folder="data").replace("stage: sft", "stage: dpo\npref_beta: 0.2"))
    assert converted["recipe"] == "dpo"
    assert converted["loss"]["beta"] == 0.2
    assert converted["dataset"][0]["_component_"] == "torchtune.datasets.preference_dataset"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("one: 1\n", "no model and dataset"),
        ("base_model: a/b\nrl: kto\ndatasets: [{path: a}]\nadapter: lora\n", "rl: this method cannot be imported"),
        ("base_model: a/b\nadapter: lora\nsequence_len: 5\n", "no model and dataset"),
        ("base_model: [\n", "not valid YAML"),
        (
            "base_model: [a/b]\ndatasets: [{path: a}]\nadapter: lora\n",
            "reads no value of this form: expected str",
        ),
    ],
)
def test_invalid_file_is_refused(tune, tmp_path, monkeypatch, text, reason):
    monkeypatch.chdir(tmp_path)
    Path("theirs.yaml").write_text(text)
    result = tune("import", "theirs.yaml")
    assert result.code == 2
    assert reason in result.err
    assert not Path("theirs_torchtune.yaml").exists()


def test_a_value_that_does_not_convert_is_listed(convert):
    text = AXOLOTL.replace("num_epochs: 2", "num_epochs: 0.5").replace("adamw_bnb_8bit", "lion_8bit")
    _, report = convert(text.replace("lora_target_modules: [gate_proj,", "lora_target_modules: [embed_tokens,"))
    assert "  num_epochs: 0.5 is not a whole number" in report
    assert "  optimizer: ['lion_8bit']: choose out of adamw_torch," in report
    assert "  lora_target_modules: ['embed_tokens']: choose out of q_proj," in report


def test_a_config_that_fails_its_check_is_kept_to_be_corrected(tune, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("theirs.yaml").write_text(AXOLOTL.replace("micro_batch_size: 3", "micro_batch_size: 0"))
    result = tune("import", "theirs.yaml")
    assert result.code == 2
    assert "Written to theirs_torchtune.yaml, which does not pass `tune validate`" in result.err
    assert "theirs_torchtune.yaml:" in result.err, "every mistake has its line"
    assert "batch_size" in result.err
    Path("theirs_torchtune.yaml").write_text(
        Path("theirs_torchtune.yaml").read_text().replace("batch_size: 0", "batch_size: 3")
    )
    assert tune("validate", "theirs_torchtune.yaml").code == 0


def test_an_existing_file_is_kept(tune, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("theirs.yaml").write_text(AXOLOTL)
    Path("mine.yaml").write_text("precious")
    assert tune("import", "theirs.yaml", "--output", "mine.yaml").code == 2
    assert Path("mine.yaml").read_text() == "precious"


def fields_of(*classes):
    """Fields of dataclasses in installed files -> literal default, or ``...``; later classes override."""
    fields = {}
    for module, name in classes:
        package, _, submodule = module.partition(".")
        folder = importlib.util.find_spec(package).submodule_search_locations[0]
        tree = ast.parse(Path(folder, f"{submodule.replace('.', '/')}.py").read_text())
        (body,) = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
        for node in body:
            if isinstance(node, ast.AnnAssign):
                value = node.value
                if isinstance(value, ast.Call):
                    value = next((word.value for word in value.keywords if word.arg == "default"), None)
                try:
                    fields[node.target.id] = ast.literal_eval(value)
                except ValueError:
                    fields[node.target.id] = ...
    return fields


def test_table_has_the_keys_and_defaults_of_the_installed_trl():
    table = read_tables()["trl"]
    fields = fields_of(
        ("transformers.training_args", "TrainingArguments"),
        ("trl.trainer.base_config", "_BaseConfig"),
        ("trl.trainer.sft_config", "SFTConfig"),
        ("trl.trainer.model_config", "ModelConfig"),
        ("trl.scripts.utils", "ScriptArguments"),
        ("trl.scripts.utils", "DatasetMixtureConfig"),
    )
    # num_processes is accelerate's, the others are of earlier releases.
    former = {"warmup_ratio", "evaluation_strategy"}
    assert not table["keys"].keys() - fields.keys() - {"num_processes"} - former
    assert table["data"].keys() <= fields_of(("trl.scripts.utils", "DatasetConfig")).keys()
    same = {key: fields[key] for key in table["defaults"] if fields[key] not in (..., None)}
    assert len(same) > 12
    assert {key: table["defaults"][key] for key in same} == same
