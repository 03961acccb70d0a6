"""``model=``, ``teacher=`` and ``data=``: one line trains any model on any data, and equals the long config."""

import json
import re

import pytest
import yaml

from tests import tiny
from torchtune._cli._shorthands import expand_shorthands
from torchtune._recipe_registry import find_config
from torchtune.config import load_and_check, to_dict
from torchtune.reports import RunFolder
from torchtune.utils import UserError

TURNS = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "the cat"}]
SHAREGPT = [{"from": "human", "value": "why"}, {"from": "gpt", "value": "the cat"}]
PAIR = {"prompt": "why", "chosen": "the cat", "rejected": "a dog"}
QUESTION = {"question": "one and two", "answer": "#### 3"}
RETRIEVAL = {"query": "who sees", "positive": "the cat"}
SCORED = {"query": "who sees", "document": "the cat", "label": 1}
NEGATIVES = {**RETRIEVAL, "negatives": ["a dog"]}
LABELED = {"prompt": "why", "completion": "the cat", "label": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny.write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def expand(checkpoint, tmp_path):
    """``expand("any_lora", rows)`` returns the overrides for rows in a file, as settings."""

    def run(config, rows, *overrides, name="rows.jsonl"):
        path = tmp_path / name
        if rows is not None:
            tiny.write_lines(path, rows)
        return expand_shorthands(find_config(config), [f"model={checkpoint}", f"data={path}", *overrides])

    return run


def dataset_of(overrides):
    """The dataset section that was found, without its source."""
    (text,) = [override for override in overrides if override.startswith("dataset={")]
    node = json.loads(text.removeprefix("dataset="))
    del node["source"]
    return node


def test_short_line_has_the_settings_of_the_hand_written_config(checkpoint, tmp_path, expand):
    from recipes.lora_finetune_single_device import recipe_main

    rows = tmp_path / "rows.jsonl"
    by_hand = f"""
recipe: lora_finetune_single_device
output_dir: /tmp/torchtune/any_lora
model:
  _component_: torchtune.models.from_hf_config
  checkpoint_dir: {checkpoint}
model_converters:
  - _component_: torchtune.modules.peft.LoRA
    rank: 8
    alpha: 16
    dropout: 0.0
    apply_to_mlp: true
tokenizer:
  _component_: torchtune.tokenizers.hf_tokenizer
  path: {checkpoint}
  max_seq_len: null
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: {checkpoint}
  output_dir: /tmp/torchtune/any_lora
dataset:
  _component_: torchtune.datasets.chat_dataset
  source: {rows}
  conversation_column: messages
  conversation_style: openai
batch_size: 2
gradient_accumulation_steps: 8
epochs: 2
optimizer:
  _component_: torch.optim.AdamW
  fused: true
  weight_decay: 0.01
  lr: 3e-4
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: 100
loss:
  _component_: torchtune.modules.loss.LinearCrossEntropyLoss
enable_activation_checkpointing: true
metric_logger:
  _component_: torchtune.training.metric_logging.DiskLogger
  log_dir: /tmp/torchtune/any_lora/logs
profiler:
  _component_: torchtune.training.setup_torch_profiler
  enabled: false
  output_dir: /tmp/torchtune/any_lora/profiling_outputs
"""
    (tmp_path / "by_hand.yaml").write_text(by_hand)
    overrides = expand("any_lora", [{"messages": TURNS}], "epochs=2")
    short = load_and_check(find_config("any_lora"), overrides, recipe_main)
    assert to_dict(short) == to_dict(load_and_check(tmp_path / "by_hand.yaml", [], recipe_main))


@pytest.mark.parametrize(
    ("config", "row", "dataset"),
    [
        ("any_lora", {"messages": TURNS}, {"conversation_column": "messages", "conversation_style": "openai"}),
        ("any_full", {"chat": SHAREGPT}, {"conversation_column": "chat", "conversation_style": "sharegpt"}),
        ("any_qlora", {"instruction": "why", "input": "", "output": "the cat"}, {}),
        ("any_kd", {"prompt": "why", "completion": "cat"}, {"column_map": {"input": "prompt", "output": "completion"}}),
        ("any_lora", QUESTION, {"column_map": {"input": "question", "output": "answer"}}),
        ("any_lora", {"text": "the cat"}, {"column": "text"}),
        ("any_lora", {"text": "the cat", "label": "big"}, {"column_map": {"input": "text", "output": "label"}}),
        ("any_lora", {"input_ids": [1, 2]}, {}),
        ("any_dpo", PAIR, {}),
        ("any_grpo", QUESTION, {"column": "question"}),
        ("any_grpo", {"question": "one and two", "answer": "3"}, {"column": "question"}),
    ],
)
def test_format_of_the_rows_sets_the_dataset(expand, config, row, dataset):
    node = dataset_of(expand(config, [row, row]))
    del node["_component_"]
    assert node == dataset


@pytest.mark.parametrize("config", ["any_full", "any_lora", "any_qlora", "any_kd"])
def test_pairs_name_the_config_for_preferences(expand, config):
    with pytest.raises(UserError, match=f"preference pairs, and {config} trains on conversations.*--config any_dpo"):
        expand(config, [PAIR])


@pytest.mark.parametrize(
    ("config", "row", "remedy"),
    [
        ("any_dpo_distributed", {"messages": TURNS}, "--config any_lora_distributed"),
        ("any_grpo", {"messages": TURNS}, "--config any_lora"),
        ("any_lora", {"prompt": "why"}, "--config any_grpo"),
        ("any_dpo", LABELED, "--config any_dpo loss=torchtune.rlhf.loss.KTOLoss"),
        ("any_kd", RETRIEVAL, "--config any_lora"),
        ("any_grpo_distributed", SCORED, "--config any_lora_distributed"),
    ],
)
def test_rows_of_another_method_name_its_config(expand, config, row, remedy):
    with pytest.raises(UserError, match=remedy):
        expand(config, [row])


def test_queries_with_passages_fit_their_loss(expand):
    overrides = expand("any_dpo", [RETRIEVAL], "loss=torchtune.rlhf.loss.InfoNCELoss", "~loss.beta")
    assert dataset_of(overrides) == {"_component_": "torchtune.datasets.embedding_dataset"}


@pytest.mark.parametrize("config", ["any_full", "any_lora", "any_qlora", "any_dpo", "any_full_distributed"])
def test_queries_with_passages_choose_the_loss_of_embedding_models(expand, config, capsys):
    from recipes.dpo import recipe_main

    overrides = expand(config, [RETRIEVAL])
    assert "InfoNCELoss, for an embedding model, in which a query finds its positive" in capsys.readouterr().err
    cfg = to_dict(load_and_check(find_config(config), overrides, recipe_main))
    assert cfg["recipe"] == "dpo"
    assert cfg["loss"] == {"_component_": "torchtune.rlhf.loss.InfoNCELoss"}
    assert cfg["dataset"]["_component_"] == "torchtune.datasets.embedding_dataset"
    assert cfg["collate_fn"] == "torchtune.data.collate_embedding"
    assert cfg["batch_size"] >= 16
    assert cfg["gradient_accumulation_steps"] == 1


@pytest.mark.parametrize("config", ["any_full", "any_lora", "any_qlora", "any_dpo", "any_lora_distributed"])
@pytest.mark.parametrize(
    ("row", "loss", "name"),
    [
        (SCORED, [], "RerankBCELoss"),
        (SCORED, ["loss=torchtune.rlhf.loss.RerankListwiseLoss"], "RerankListwiseLoss"),
        (NEGATIVES, ["loss=torchtune.rlhf.loss.RerankBCELoss"], "RerankBCELoss"),
    ],
)
def test_queries_with_labels_choose_loss_and_head_of_rerankers(expand, config, row, loss, name, capsys):
    from recipes.dpo import recipe_main

    overrides = expand(config, [row], *loss)
    assert f"{name}, for a reranker, whose new head" in capsys.readouterr().err
    cfg = to_dict(load_and_check(find_config(config), overrides, recipe_main))
    assert cfg["recipe"] == "dpo"
    assert cfg["loss"] == {"_component_": f"torchtune.rlhf.loss.{name}"}
    assert cfg["dataset"]["_component_"] == "torchtune.datasets.reranking_dataset"
    assert cfg["dataset"].get("listwise", False) == (name == "RerankListwiseLoss")
    assert cfg["collate_fn"] == "torchtune.data.collate_reranking"
    assert cfg["model"]["num_classes"] == 1
    assert cfg["model"]["base_model_path"] == "torchtune.models.from_hf_config"
    for converter in cfg.get("model_converters") or ():
        if converter["_component_"].endswith(".LoRA"):
            assert converter["train_modules"] == ["score"]


def test_queries_with_negatives_are_refused_with_both_readings(expand):
    both = "loss=torchtune.rlhf.loss.InfoNCELoss for an embedding model, or loss=torchtune.rlhf.loss.RerankBCELoss"
    with pytest.raises(UserError, match=f"queries with negatives train two kinds of models: add {both}"):
        expand("any_full", [NEGATIVES])
    chosen = expand("any_full", [NEGATIVES], "loss=torchtune.rlhf.loss.InfoNCELoss")
    assert dataset_of(chosen) == {"_component_": "torchtune.datasets.embedding_dataset"}


def test_loss_of_other_rows_is_refused(expand):
    with pytest.raises(UserError, match="InfoNCELoss trains on queries with passages, and the rows are queries with l"):
        expand("any_full", [SCORED], "loss=torchtune.rlhf.loss.InfoNCELoss")
    reader = "dataset._component_=torchtune.datasets.embedding_dataset"
    with pytest.raises(UserError, match="read by embedding_dataset: leave out the loss"):
        expand("any_full", [NEGATIVES], "loss=torchtune.rlhf.loss.RerankBCELoss", reader)


def test_a_batch_size_and_a_loss_of_the_command_line_are_kept(expand):
    overrides = expand("any_full", [RETRIEVAL], "batch_size=4", "loss.temperature=0.02")
    assert [override for override in overrides if override.startswith("batch_size")] == ["batch_size=4"]
    assert overrides.index("loss.temperature=0.02") > overrides.index(
        'loss={"_component_": "torchtune.rlhf.loss.InfoNCELoss"}'
    )


def test_named_recipe_is_not_replaced_by_the_rows(checkpoint, tmp_path):
    path = tiny.write_lines(tmp_path / "rows.jsonl", [RETRIEVAL])
    overrides = [f"model={checkpoint}", f"data={path}"]
    with pytest.raises(UserError, match="the recipe full_finetune_single_device does not train on such rows: leave"):
        expand_shorthands(find_config("any_full"), overrides, "full_finetune_single_device")
    # The recipe of the rows may be named.
    assert "recipe=dpo" not in expand_shorthands(find_config("any_dpo"), overrides, "dpo")


def test_rows_choose_the_recipe_of_the_command(tune, checkpoint, tmp_path):
    path = tiny.write_lines(tmp_path / "rows.jsonl", [RETRIEVAL] * 20)
    settings = [f"model={checkpoint}", f"data={path}", f"output_dir={tmp_path / 'out'}", "device=cpu"]
    checked = tune("run", "--config", "any_lora", *settings, "--dry-run")
    assert checked.code == 0, checked.err
    assert "batch       16 rows a step = 16 (batch_size) x 1 (accumulation)" in checked.out


def test_labeled_answers_fit_their_loss(expand):
    overrides = expand("any_dpo", [LABELED], "loss=torchtune.rlhf.loss.KTOLoss")
    assert dataset_of(overrides) == {"_component_": "torchtune.datasets.kto_dataset"}


def test_rows_of_two_formats_are_refused_with_both(expand):
    rows = [{"messages": TURNS}, {"instruction": "why", "input": "", "output": "cat"}]
    with pytest.raises(UserError, match=r"OpenAI messages .* from row 1 and Alpaca .* from row 2: split the file"):
        expand("any_lora", rows)


BAD_CHATS = [
    {"messages": []},
    {"messages": None},
    {"messages": "x"},
    {"messages": [], "id": "a", "source": "b"},
    {},
    {"id": 3},
]


@pytest.mark.parametrize("bad", BAD_CHATS)
@pytest.mark.parametrize("first", [True, False])
def test_bad_row_is_no_second_format(expand, bad, first):
    rows = [{"messages": TURNS}, {"messages": TURNS}]
    rows.insert(0 if first else 2, bad)
    node = dataset_of(expand("any_lora", rows, "dataset.on_bad_row=skip"))
    assert (node["conversation_column"], node["on_bad_row"]) == ("messages", "skip")


@pytest.mark.parametrize(
    ("good", "bad", "builder"),
    [
        ({"prompt": "why", "completion": "cat"}, {"prompt": "why", "completion": None}, "instruct_dataset"),
        ({"input": "why", "output": "cat"}, {"input": "why", "output": 5}, "instruct_dataset"),
        ({"text": "cat"}, {"text": None}, "text_completion_dataset"),
    ],
)
def test_row_that_lacks_a_value_is_no_second_format(expand, good, bad, builder):
    node = dataset_of(expand("any_lora", [good, good, bad]))
    assert node["_component_"].endswith(f".{builder}")


def test_row_of_another_format_is_refused_though_bad_rows_are_skipped(expand):
    others = [{"text": "a cat"}, {"asked": "why", "said": "cat"}, {"prompt": "why", "chosen": "a", "rejected": "b"}]
    for other in others:
        with pytest.raises(UserError, match=r"from row 1 and .* from row 3: split the file"):
            expand("any_lora", [{"messages": TURNS}, {"messages": TURNS}, other], "dataset.on_bad_row=skip")


def test_bad_row_of_the_hub_is_no_second_format(expand, monkeypatch):
    rows = [{"messages": []}, {"messages": TURNS}]
    monkeypatch.setattr("torchtune.datasets.load_rows", lambda name, **_: iter(rows))
    overrides = expand_shorthands(find_config("any_lora"), ["data=owner/chats"])
    assert dataset_of(overrides)["conversation_column"] == "messages"


def test_conversations_of_two_formats_have_one_reader(expand):
    rows = [{"messages": TURNS}, {"conversations": SHAREGPT}]
    assert dataset_of(expand("any_lora", rows)) == {"_component_": "torchtune.datasets.chat_dataset"}


@pytest.mark.parametrize(
    ("row", "first", "second"),
    [
        ({"draft": TURNS, "final": TURNS}, "conversation_column=draft", "conversation_column=final"),
        ({"prompt": "a", "completion": "b", "response": "c"}, "column_map.output=completion", "output=response"),
    ],
)
def test_rows_with_two_readings_are_refused_with_both(expand, row, first, second):
    with pytest.raises(UserError, match=f"two ways: add either .*{first}.* or .*{second}"):
        expand("any_lora", [row])


def test_named_column_chooses_a_reading(expand):
    overrides = expand("any_lora", [{"draft": TURNS, "final": TURNS}], "dataset.conversation_column=final")
    assert dataset_of(overrides)["conversation_column"] == "final"


def test_unknown_columns_are_named(expand):
    with pytest.raises(UserError, match=r"the columns asked, said: name those that are read.*dataset\.column_map"):
        expand("any_lora", [{"asked": "why", "said": "the cat"}])
    overrides = expand("any_lora", None, "dataset.column_map.input=asked", "dataset.column_map.output=said")
    assert dataset_of(overrides)["_component_"] == "torchtune.datasets.instruct_dataset"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"input": "why", "output": 5}, "column 'output' holds int, not a text"),
        ({"question": "why", "answer": None}, "column 'answer' holds nothing, not a text"),
        ({"messages": []}, "column 'messages' holds a conversation without turns"),
        ({"a": 1, "b": 2}, "none of the columns a, b holds a text or turns"),
    ],
)
def test_values_that_no_dataset_reads_are_named(expand, row, reason):
    for overrides in ([], ["dataset.on_bad_row=skip"]):
        with pytest.raises(UserError, match=f"no dataset reads its rows: row 1: {reason}"):
            expand("any_lora", [row, row], *overrides)
    with pytest.raises(UserError, match="name those that are read"):  # the second row has other names alone
        expand("any_lora", [{"asked": None}, {"asked": "why", "said": "cat"}])


def test_reward_compares_with_the_column_of_the_answers(expand):
    assert "rewards.0.column=output" in expand("any_grpo", [{"input": "one and two", "output": "3"}])
    with pytest.raises(UserError, match=r"compares answers with column 'answer', which the rows lack"):
        expand("any_grpo", [{"prompt": "why"}])
    with pytest.raises(UserError, match=r"name the column of the right answer, rewards.0.column="):
        expand("any_grpo", [{"prompt": TURNS[:1], "solution": "4"}])
    assert expand("any_grpo", [{"prompt": "why", "right": "3"}], "rewards.0.column=right")


def test_table_is_read(expand, tmp_path):
    (tmp_path / "faq.csv").write_text("prompt,response\nwhy,the cat\n")
    node = dataset_of(expand("any_lora", None, name="faq.csv"))
    assert node["column_map"] == {"input": "prompt", "output": "response"}


def test_images_ask_for_the_whole_model_and_its_processor(expand):
    row = {"messages": SHAREGPT, "images": ["cat.png"]}
    overrides = expand("any_lora", [row])
    assert "model.images=True" in overrides
    assert any("torchtune.models.image_text_transform" in override for override in overrides)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nothing", "no such folder, and a repository of the hub is called owner/name"),
        ("nothing.gguf", "there is no such file"),
        ("empty", r"no config\.json"),
        ("bare", "no weights"),
        ("quantized", r"GGUF files alone: name one of them, model=.*small\.gguf"),
    ],
)
def test_model_that_cannot_be_read_is_refused(tmp_path, monkeypatch, name, reason):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text("{}")
    (tmp_path / "quantized").mkdir()
    (tmp_path / "quantized" / "small.gguf").touch()
    with pytest.raises(UserError, match=f"model={name}.*{reason}"):
        expand_shorthands(find_config("any_lora"), [f"model={name}"])


@pytest.mark.parametrize("name", ["model", "teacher", "data"])
def test_shorthand_without_value_is_refused(name):
    with pytest.raises(UserError, match=f"^{name}= is empty: name "):
        expand_shorthands(find_config("any_kd"), [f"{name}="])


def test_table_without_header_is_refused_with_its_first_line(expand, tmp_path):
    (tmp_path / "faq.csv").write_text("why,the cat\nwhere,a dog\n")
    with pytest.raises(UserError, match=r"columns why, the cat \(those of a table are in its first line\): name those"):
        expand("any_lora", None, name="faq.csv")


@pytest.mark.parametrize(
    ("text", "reason"),
    [("", "the file is empty"), ("\n\n", "there are no rows in it"), ("[\n", "no JSON, .*; correct the file")],
)
def test_file_without_rows_is_refused(expand, tmp_path, text, reason):
    (tmp_path / "chats.jsonl").write_text(text)
    with pytest.raises(UserError, match=reason):
        expand("any_lora", None, name="chats.jsonl")


def test_folder_of_rows_is_read(expand, tmp_path):
    (tmp_path / "chats").mkdir()
    for name in ("a", "b"):
        tiny.write_lines(tmp_path / "chats" / f"{name}.jsonl", [{"messages": TURNS}])
    assert dataset_of(expand("any_lora", None, name="chats"))["conversation_style"] == "openai"


def test_folder_without_rows_is_refused(expand, tmp_path):
    (tmp_path / "chats").mkdir()
    with pytest.raises(UserError, match=r"chats: the folder has no data files: put \.jsonl, \.json, \.csv or"):
        expand("any_lora", None, name="chats")


def test_gguf_file_without_tokenizer_is_refused_and_leaves_nothing(tmp_path, monkeypatch):
    import tests.torchtune.checkpoints.gguf_files as gguf_files

    monkeypatch.setenv("TORCHTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(gguf_files, "_write_tokenizer", lambda *arguments: None)
    file = gguf_files.write_gguf(tmp_path / "bare.gguf").path
    with pytest.raises(UserError, match=r"bare\.gguf has no metadata 'tokenizer\.ggml\.tokens': .*; convert the model"):
        expand_shorthands(find_config("any_lora"), [f"model={file}"])
    assert not list((tmp_path / "cache" / "gguf").iterdir())


def test_gguf_file_is_converted_once(tmp_path, capsys):
    from tests.torchtune.checkpoints.gguf_files import write_gguf

    file = write_gguf(tmp_path / "small.gguf").path
    (first,) = expand_shorthands(find_config("any_lora"), [f"model={file}"])
    assert "its weights are written as bf16" in capsys.readouterr().err
    (second,) = expand_shorthands(find_config("any_lora"), [f"model={file}"])
    assert first == second
    assert "written" not in capsys.readouterr().err


def test_component_stays_a_component():
    overrides = ["model=torchtune.models.smol.smollm2_135m", "epochs=2"]
    assert set(expand_shorthands(find_config("any_lora"), overrides)) == set(overrides)


def test_data_fits_every_config(expand):
    overrides = expand("smol/135M_lora_single_device", [{"messages": TURNS}])
    assert dataset_of(overrides)["_component_"] == "torchtune.datasets.chat_dataset"


def test_teacher_and_model_are_logged_in_one_line_each(checkpoint, capsys):
    overrides = expand_shorthands(find_config("any_kd"), [f"model={checkpoint}", f"teacher={checkpoint}"])
    assert overrides == [f"model.checkpoint_dir={checkpoint}", f"teacher_model.checkpoint_dir={checkpoint}"]
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines] == ["model", "teacher"]
    assert all("LlamaForCausalLM" in line for line in lines)


def test_cp_and_cat_write_the_complete_config(tune, checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny.write_lines(tmp_path / "chats.jsonl", [{"messages": TURNS}])
    arguments = [f"model={checkpoint}", "data=chats.jsonl", "epochs=3", "~lr_scheduler", "seed=1"]
    assert tune("cp", "any_lora", "mine.yaml", *arguments).code == 0
    text = (tmp_path / "mine.yaml").read_text()
    assert tune("cat", "any_lora", *arguments).out == text
    config = yaml.safe_load(text)
    assert config["model"]["checkpoint_dir"] == str(checkpoint)
    assert config["dataset"]["source"] == "chats.jsonl"
    assert (config["epochs"], config["seed"], config.get("lr_scheduler")) == (3, 1, None)
    assert "rank: 8 # higher learns more" in text
    assert tune("validate", "mine.yaml").code == 0
    assert "has no settings to change" in tune("cp", "dpo", "mine.py", "epochs=2").err


def test_one_line_runs_with_and_without_config_option(tune, checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny.write_lines(tmp_path / "chats.jsonl", [{"messages": TURNS}] * 16)
    arguments = [f"model={checkpoint}", "data=chats.jsonl", "device=cpu", f"output_dir={tmp_path / 'out'}"]
    for command in (["run", "--config", "any_lora"], ["run", "any_lora"]):
        result = tune(*command, *arguments, "--dry-run")
        assert result.code == 0
        assert "The run can start" in result.out


@pytest.mark.parametrize(
    ("family", "extra"),
    [
        ("Gemma3Text", {"sliding_window": 16, "query_pre_attn_scalar": 16}),
        ("Granite", {"logits_scaling": 8.0, "residual_multiplier": 0.22}),
        ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    ],
)
def test_one_line_trains_other_families_as_the_long_config_does(tune, tmp_path, monkeypatch, family, extra):
    import transformers

    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "model"
    folder.mkdir()
    vocabulary = tiny.write_tokenizer(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 128, "eos_token_id": 2}
    config = getattr(transformers, f"{family}Config")(vocab_size=vocabulary, **sizes, **extra)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    rows = tiny.write_conversations(tmp_path / "chats.jsonl", 4)
    dataset = "{_component_: torchtune.datasets.chat_dataset, source: chats.jsonl, conversation_column: messages, "
    dataset += "conversation_style: openai}"
    settings = ["device=cpu", "dtype=fp32", "seed=3", "gradient_accumulation_steps=1", "max_steps=1"]
    losses = []
    for name, source in (
        ("short", [f"model={folder}", f"data={rows.name}"]),
        ("long", [f"model.checkpoint_dir={folder}", f"dataset={dataset}"]),
    ):
        result = tune("run", "any_full", *source, *settings, f"output_dir={tmp_path / name}")
        assert result.code == 0, result.err
        losses.append(RunFolder(tmp_path / name).curve("loss"))
    assert losses[0] == losses[1]
    assert len(losses[0]) == 1


def test_share_of_the_rows_is_held_out(expand, checkpoint, tmp_path):
    from torchtune.datasets import instantiate_dataset
    from torchtune.tokenizers import hf_tokenizer

    rows = [{"messages": [{**TURNS[0], "content": f"why {number}"}, TURNS[1]]} for number in range(20)]
    overrides = expand("any_lora", rows, "dataset_val=10%")
    assert "run_val_every_n_steps=epoch" in overrides
    config = load_and_check(find_config("any_lora"), overrides)
    tokenizer = hf_tokenizer(str(checkpoint))
    parts = [instantiate_dataset(node, tokenizer) for node in (config.dataset, config.dataset_val)]
    assert [len(part) for part in parts] == [18, 2]
    held_out = tokenizer.decode(list(parts[1][1]["tokens"]), skip_special_tokens=False)
    assert "why 19" in held_out.replace("1 9", "19")


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("dataset_val=0%", "there would be no validation data"),
        ("dataset.split=train[:50%]", "takes a part of the rows: set dataset_val.split"),
        ("dataset.streaming=True", "the dataset must be one source, and not streamed"),
    ],
)
def test_share_that_cannot_be_held_out_is_refused(expand, override, reason):
    share = [] if override.startswith("dataset_val") else ["dataset_val=5%"]
    with pytest.raises(UserError, match=re.escape(reason)):
        expand("any_lora", [{"messages": TURNS}] * 4, override, *share)


@pytest.mark.parametrize(
    ("labels", "outputs", "description"),
    [
        (["spam", "ham", "spam"], 2, "2 classes (single_label_classification)"),
        ([3, 1, 2], 3, "3 classes (single_label_classification)"),
        ([["spam", "big"], [], ["new"]], 3, "3 classes (multi_label_classification)"),
        ([0.5, 1.5, 2.0], 1, "one number per row (regression)"),
    ],
)
@pytest.mark.parametrize("config", ["any_full", "any_lora"])
def test_loss_of_classes_chooses_the_head_by_the_labels(expand, config, labels, outputs, description, capsys):
    rows = [{"text": "the cat", "label": label} for label in labels]
    overrides = expand(config, rows, "loss=torchtune.modules.loss.ClassificationLoss")
    assert description in capsys.readouterr().err
    assert dataset_of(overrides) == {"_component_": "torchtune.datasets.classification_dataset"}
    assert f"model.num_classes={outputs}" in overrides
    assert ('model_converters.0.train_modules=["score"]' in overrides) == (config == "any_lora")


def test_labels_that_are_no_answers_are_refused_with_both_readings(expand):
    rows = [{"text": "the cat", "label": 3}]
    for overrides in ([], ["dataset.split=train"], ["dataset.packed=True"]):
        with pytest.raises(UserError, match=r"loss.ClassificationLoss for a classifier, or dataset.column=text"):
            expand("any_lora", rows, *overrides)
    on_texts = {"_component_": "torchtune.datasets.text_completion_dataset", "column": "text"}
    assert dataset_of(expand("any_lora", rows, "dataset.column=text")) == on_texts


def test_labeled_conversations_are_for_classifiers(expand):
    row = {"messages": TURNS[:1], "label": "spam"}
    with pytest.raises(UserError, match="labeled conversations without an answer, from which a classifier learns"):
        expand("any_full", [row])
    overrides = expand("any_full", [row], "loss=torchtune.modules.loss.ClassificationLoss")
    assert dataset_of(overrides) == {"_component_": "torchtune.datasets.classification_dataset", "column": "messages"}
    # A conversation that ends with an answer is trained on as such.
    assert dataset_of(expand("any_full", [{**row, "messages": TURNS}]))["_component_"].endswith("chat_dataset")
