"""``tune eval`` on rows: scores of answers and perplexity against transformers, what is kept, what is refused."""

import json
import math
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import OPENAI, read_lines, write_checkpoint, write_conversations, write_lines
from tests.torchtune._cli.test_chat import reference

COMMON = ["--device", "cpu", "--dtype", "fp32", "--max-new-tokens", "6"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval")
    write_checkpoint(folder / "base")
    write_checkpoint(folder / "trained", seed=1)
    return folder


@pytest.fixture
def evaluate(tune, tmp_path, monkeypatch):
    """``tune eval`` in an empty folder, with short answers."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: tune("eval", *arguments, *COMMON)


def greedy(checkpoint, questions):
    """Six greedy tokens of transformers."""
    return [reference(checkpoint, [question]) for question in questions]


def test_two_models_are_scored_compared_and_resumed(folder, tmp_path, evaluate):
    questions = ["the cat sees", "a dog", "why not", "red red red"]
    right = greedy(folder / "trained", questions)
    asked = [{"prompt": question, "answer": answer} for question, answer in zip(questions, right, strict=True)]
    asked[1] |= {"answer": "never", "hard": True}
    data = write_lines(tmp_path / "rows.jsonl", asked)
    half = "tests.torchtune.evaluation.scores.half"
    command = [folder / "trained", "--against", folder / "base", "--data", data, "--score", "exact", "--score", half]
    out = evaluate(*command).out
    results = json.loads((tmp_path / "eval" / "rows.results.json").read_text())["models"]
    assert [result["scores"]["exact"]["mean"] for result in results] == [0.0, 0.75]
    assert results[1]["scores"]["exact"]["standard_error"] == pytest.approx(0.5 / math.sqrt(4))
    assert results[1]["scores"]["half"] == {"mean": 0.5, "standard_error": 0.0, "unscored": 1}
    lines = out.splitlines()
    assert lines[0].split() == ["exact", "half"]
    assert lines[2].split() == [str(folder / "trained"), "0.750", "±", "0.250", "0.500", "±", "0.000"]
    assert lines[3] == "exact       +0.75 (95 % interval -inf to +inf), 4 rows: same within noise"
    assert "could not be scored by half" in out
    path = Path(results[1]["answers"])
    answers = read_lines(path)
    assert [row["answer"] for row in answers] == right
    assert [row["right"] for row in answers] == [row["answer"] for row in asked]
    assert answers[1]["scores"] == {"exact": 0.0, "half": None}
    # Killed in the third answer: the first two are kept, the rest is answered, all are scored.
    answer_lines = path.read_bytes().splitlines(keepends=True)
    edited_line = json.dumps({**answers[0], "answer": "kept"}).encode() + b"\n"
    path.write_bytes(edited_line + answer_lines[1] + answer_lines[2][:30])
    evaluate(*command)
    again = read_lines(path)
    assert [row["answer"] for row in again] == ["kept", *right[1:]]
    assert again[0]["scores"]["exact"] == 0.0
    assert len(list((tmp_path / "eval").glob("*.jsonl"))) == 2


def test_other_weights_in_the_same_folder_are_noticed(folder, tmp_path, evaluate):
    data = write_lines(tmp_path / "rows.jsonl", [{"prompt": "the cat", "answer": "x"}])
    model = write_checkpoint(tmp_path / "model")
    evaluate(model, "--data", data, "--score", "exact")
    (first,) = (tmp_path / "eval").glob("*.jsonl")
    seconds = os.stat(model / "model.safetensors")
    (model / "model.safetensors").write_bytes((folder / "trained" / "model.safetensors").read_bytes())
    os.utime(model / "model.safetensors", ns=(seconds.st_atime_ns, seconds.st_mtime_ns))
    evaluate(model, "--data", data, "--score", "exact")
    second = next(path for path in (tmp_path / "eval").glob("*.jsonl") if path != first)
    answers = [json.loads(path.read_text())["answer"] for path in (first, second)]
    assert answers == [greedy(folder / name, ["the cat"])[0] for name in ("base", "trained")]


def test_perplexity_is_that_of_the_labelled_tokens(folder, tmp_path, evaluate):
    from transformers import AutoModelForCausalLM

    from torchtune.datasets import chat_dataset
    from torchtune.tokenizers import hf_tokenizer

    data = write_conversations(tmp_path / "rows.jsonl", 10)
    evaluate(folder / "base", "--data", data, "--perplexity")
    result = json.loads((tmp_path / "eval" / "rows.results.json").read_text())["models"][0]["perplexity"]
    dataset = chat_dataset(hf_tokenizer(folder / "base"), source=str(data), **OPENAI)
    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    total, count = 0.0, 0
    for row in dataset:
        tokens, labels = (torch.as_tensor(row[name]) for name in ("tokens", "labels"))
        with torch.no_grad():
            logits = model(tokens[None]).logits[0].double()
        total += torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum").item()
        count += int((labels != -100).sum())
    assert result["tokens"] == count
    assert result["loss"] == pytest.approx(total / count, rel=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)


def test_two_models_are_compared_by_what_they_retrieve(folder, tmp_path, evaluate):
    corpus = tmp_path / "corpus.json"
    texts = {"a": "the cat sees", "b": "one dog", "c": "big red bird"}
    relevant = {"q1": ["a"], "q2": ["b"]}
    corpus.write_text(
        json.dumps({"queries": {"q1": "the cat sees", "q2": "dog"}, "corpus": texts, "relevant": relevant})
    )
    command = [folder / "trained", "--against", folder / "base", "--retrieval", corpus, "--pooling", "mean"]
    out = evaluate(*command, "--dimensions", "16").out
    assert "2 queries, 3 texts" in out
    results = json.loads((tmp_path / "eval" / "corpus.retrieval.json").read_text())
    assert [entry["pooling"] for entry in results["models"]] == ["mean", "mean"]
    for entry in results["models"]:
        assert entry["scores"]["recall@1"] >= 0.5  # the first query is a text of the corpus
        assert entry["scores"]["recall@5"] == 1.0
    assert "--pooling needs texts to embed" in evaluate(folder / "base", "--pooling", "mean").err


def test_invalid_evaluation_is_refused(folder, tmp_path, evaluate):
    data = write_lines(tmp_path / "rows.jsonl", [{"prompt": "a", "answer": "b", "divisor": i} for i in (1, 0)])
    model = folder / "base"
    raises = "tests.torchtune.evaluation.scores.raises"
    error = evaluate(model, "--data", data, "--score", raises).err
    assert "score: 'raises' fails for row 2: ZeroDivisionError" in error
    (path,) = (tmp_path / "eval").glob("*.jsonl")
    assert len(path.read_text().splitlines()) == 2  # what was answered is kept
    diverged = write_checkpoint(tmp_path / "diverged")
    tensors = load_file(diverged / "model.safetensors")
    save_file({name: tensor * math.nan for name, tensor in tensors.items()}, diverged / "model.safetensors")
    chats = write_conversations(tmp_path / "chats.jsonl", 2)
    empty = tmp_path / "empty.json"
    empty.write_text("[]")
    for args, message in {
        (diverged, "--data", data, "--score", "exact"): "logits are not finite in torch.float32: load it in fp32",
        (diverged, "--data", chats, "--perplexity"): "perplexity: the loss is nan",
        (model,): "give rows in --data, or --tasks",
        (model, "--score", "exact"): "need rows",
        (model, "--data", data): "there is nothing to measure",
        (tmp_path / "none", "--data", data, "--score", "exact"): "there is no such folder",
        (model, "--data", tmp_path / "none.jsonl", "--score", "exact"): "there is no file",
        (model, "--data", tmp_path / "none.jsonl", "--perplexity"): "there is no such file",
        (model, "--data", empty, "--perplexity"): "it has no rows",
        (model, "--data", data, "--perplexity"): "perplexity needs texts or conversations",
        (model, "--data", data, "--perplexity", "--answer", "b"): "need --score",
        (model, "--data", data, "--score", "exact", "--limit", "0"): "--limit is 0",
    }.items():
        assert message in evaluate(*args).err, args
