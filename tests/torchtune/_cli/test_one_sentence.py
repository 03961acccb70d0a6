"""Commands with a reward model, and commands without their config: one sentence each."""

import json

import pytest
import torch

from tests.tiny import write_checkpoint


@pytest.fixture(scope="module")
def reward(tmp_path_factory):
    """A checkpoint of a reward model."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    folder = write_checkpoint(tmp_path_factory.mktemp("reward") / "model")
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(folder, num_labels=1))
    model.save_pretrained(folder)
    (folder.parent / "rows.jsonl").write_text(json.dumps({"prompt": "the cat", "answer": "sees"}))
    return folder


NO_TEXT = (
    "error: model: it is a classifier or a reward model, which gives scores and no text: give a language model, or use "
    "torchtune.classify or tune eval.\n"
)


@pytest.mark.parametrize(
    "command",
    [
        "chat --model MODEL",
        "serve MODEL --port 0",
        "run generate --config any_generation checkpointer.checkpoint_dir=MODEL device=cpu prompt.user=Hi",
    ],
)
def test_reward_model_is_refused_where_text_is_generated(command, reward, tune, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = str(reward.parent / "rows.jsonl")
    done = tune(*command.replace("MODEL", str(reward)).replace("ROWS", rows).split())
    assert done.code in (1, 2)
    assert done.err.endswith(NO_TEXT)


@pytest.mark.parametrize("option", ["--score exact", "--perplexity", "--tasks tune_facts"])
def test_answers_of_a_classifier_are_not_evaluated(option, reward, tune):
    done = tune("eval", str(reward), "--data", str(reward.parent / "rows.jsonl"), *option.split())
    assert done.code == 2
    name = option.split()[0]
    assert done.err == f"error: {name}: {reward} is a classifier, which gives no text: leave it out.\n"


@pytest.mark.parametrize("to", ["gguf", "ollama"])
def test_export_of_a_reward_model_as_gguf_is_refused(to, reward, tune, tmp_path):
    done = tune("export", reward, "--to", to, "--output", tmp_path / "out")
    assert done.code == 2
    assert (
        "is a classifier or a reward model, and GGUF files are written of language models: choose --to hf" in done.err
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("imported_aside")
def test_scores_of_an_export_are_compared_by_their_spread_over_prompts(reward, tune, tmp_path):
    done = tune("export", reward, "--to", "hf", "--output", tmp_path / "out")
    assert done.code == 0, done.err


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("estimate mine.yaml", "tune estimate needs a config: tune estimate --config mine.yaml --simulate 8xH100."),
        ("estimate mine.py epochs=1", "tune estimate needs a config: tune estimate --config CONFIG --simulate 8xH100."),
        ("selfcheck mine.yaml", "tune selfcheck needs a config: tune selfcheck --config mine.yaml."),
    ],
)
def test_command_without_a_config_shows_how_to_name_one(command, expected, tune):
    done = tune(*command.split())
    assert (done.code, done.err, done.out) == (2, f"error: {expected}\n", "")


SMALLEST = {
    "serve MISSING": "--port 0 --max-new-tokens 1 --max-sequences 1 --max-waiting 1",
    "chat --model MISSING": "--temperature 0 --top-k 0 --top-p 0 --min-p 0 --max-new-tokens 1 --seed 0",
    "eval MISSING": (
        "--limit 1 --max-new-tokens 1 --max-sequences 1 --temperature 0 --seed 0 --dimensions 1 --rerank-first 1 "
        "--top-k 0 --top-p 0 --min-p 0"
    ),
}


@pytest.mark.parametrize("command", SMALLEST)
def test_smallest_value_of_an_option_is_taken_and_a_smaller_one_is_not(command, tune, tmp_path):
    words = command.replace("MISSING", str(tmp_path / "missing")).split()
    done = tune(*words, *SMALLEST[command].split())
    assert done.err.startswith(f"error: {tmp_path / 'missing'}: there is no such folder")
    options = SMALLEST[command].split()
    for name, smallest in zip(options[::2], options[1::2], strict=True):
        done = tune(*words, f"{name}={int(smallest) - 1}")
        assert done.code == 2
        assert f"error: {name} is {int(smallest) - 1}" in done.err
        assert done.err.endswith(f"it must be at least {smallest}.\n")


@pytest.mark.parametrize("command", ["chat --model MISSING", "eval MISSING"])
def test_largest_probability_is_taken_and_a_larger_one_is_not(command, tune, tmp_path):
    words = command.replace("MISSING", str(tmp_path / "missing")).split()
    assert "there is no such folder" in tune(*words, "--top-p=1", "--min-p=1").err
    for name in ("--top-p", "--min-p"):
        assert tune(*words, f"{name}=1.5").err == f"error: {name} is 1.5: it must be at most 1.\n"
