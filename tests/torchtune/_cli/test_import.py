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


def write_rows(path):
    turns = [{"role": "user", "content": "red"}, {"role": "assistant", "content": "blue"}]
    path.write_text(json.dumps({"chats": turns}) + "\n")
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
    for key in ("datasets.0.roles_to_train", "plugins"):
        assert f"  {key}: " in left
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
    assert "  eval_strategy: set dataset_val" in report


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
    # num_processes is accelerate's, warmup_ratio one of earlier releases.
    assert not table["keys"].keys() - fields.keys() - {"num_processes", "warmup_ratio"}
    assert table["data"].keys() <= fields_of(("trl.scripts.utils", "DatasetConfig")).keys()
    same = {key: fields[key] for key in table["defaults"] if fields[key] not in (..., None)}
    assert len(same) > 12
    assert {key: table["defaults"][key] for key in same} == same
