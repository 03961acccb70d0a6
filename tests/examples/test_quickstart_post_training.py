"""The examples of preferences, rewards and tools, whole, on a random model of two layers."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.docs import tiny_models
from tests.tiny import write_checkpoint
from torchtune._cli import tune
from torchtune.reports import RunFolder
from torchtune.training.metric_logging import DiskLogger

FOLDER = Path(__file__).parents[2] / "examples" / "quickstart"
NAMES = ("steps", "score", "dpo", "embed", "grpo", "calculator", "agent", "vision")
TINY = [
    "model._component_=tests.docs.tiny_models.lora_smollm2_135m",
    "dtype=fp32",
    "save_every_n_minutes=0.00001",
    "log_level=ERROR",
]


@pytest.fixture
def examples(tmp_path, monkeypatch):
    """The scripts, with few short orders, a tiny model in the place of the real one, and runs in this process."""
    monkeypatch.syspath_prepend(str(FOLDER))
    modules = {name: __import__(name) for name in NAMES}
    lines = (FOLDER / "data" / "train.jsonl").read_text().splitlines()
    for name, rows in (("train", lines[:24]), ("held_out", lines[24:28])):
        orders = [json.loads(line) for line in rows]
        for order in orders:  # the model has 256 positions
            order["messages"] = [{**turn, "content": turn["content"][:50]} for turn in order["messages"]]
            order["messages"][-1] = json.loads(rows[orders.index(order)])["messages"][-1]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(order) + "\n" for order in orders))
    values = {"DATA": tmp_path, "HELD_OUT": tmp_path / "held_out.jsonl", "STEPS": 3, "STEPS_BEFORE": 1}
    for module in modules.values():
        for name, value in values.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)

    def in_process(arguments):
        options = ["run_val_every_n_steps=2"] if any("dataset_val" in word for word in arguments) else []
        steps = [] if any("max_steps" in word for word in arguments) else ["max_steps_per_epoch=1"]
        tiny = TINY
        if any("image_text_model" in argument for argument in arguments):
            tiny = [word for word in TINY if "model." not in word]
        monkeypatch.setattr(sys, "argv", ["tune", *arguments, *tiny, *options, *steps])
        with pytest.raises(SystemExit) as end:
            tune.main()
        return end.value.code or 0

    monkeypatch.setattr(modules["steps"], "tune", in_process)
    yield modules
    for name in NAMES:
        sys.modules.pop(name)


def run(main, folder, monkeypatch):
    """Run an example in a working directory of its own."""
    checkpoint = folder / "quickstart" / "SmolLM2-135M-Instruct"
    if not checkpoint.exists():
        write_checkpoint(checkpoint)
    tiny_models.FOLDER[:] = [checkpoint]
    monkeypatch.chdir(folder)
    main()
    return folder / "quickstart"


def die_at(step, monkeypatch):
    """End the next run that logs ``step`` as Ctrl-C does."""
    log = DiskLogger.log_dict

    def log_dict(self, payload, **at):
        if at["step"] == step:
            monkeypatch.setattr(DiskLogger, "log_dict", log)
            raise KeyboardInterrupt
        log(self, payload, **at)

    monkeypatch.setattr(DiskLogger, "log_dict", log_dict)


@pytest.mark.parametrize(("name", "watched"), [("dpo", "margins"), ("grpo", "ExactMatch")])
def test_example_resumes_after_a_kill(name, watched, examples, tmp_path, monkeypatch):
    example = examples[name]
    uninterrupted = run(example.main, tmp_path / "whole", monkeypatch)
    assert (uninterrupted / name / "report.html").read_text().count("<svg") > 5
    report = json.loads((uninterrupted / f"{name}.json").read_text())
    assert [set(row) for row in report["answers"]] == [{"order", "right", "before", "after"}] * 4
    die_at(3, monkeypatch)
    with pytest.raises(SystemExit, match="The same command goes on"):
        run(example.main, tmp_path / "killed", monkeypatch)
    killed = run(example.main, tmp_path / "killed", monkeypatch)
    metrics = ("grad_norm", *(f"{prefix}rewards/{watched}" for prefix in ("", "val_")))
    full_run = RunFolder(uninterrupted / name)
    continued_run = RunFolder(killed / name)
    for metric, length in zip(metrics, [3, 3, 1], strict=True):
        assert full_run.curve(metric) == continued_run.curve(metric)
        assert len(full_run.curve(metric)) == length
    files = [(folder / name / "epoch_0" / "model.safetensors").read_bytes() for folder in (uninterrupted, killed)]
    assert files[0] == files[1]
    assert files[0] != (uninterrupted / "SmolLM2-135M-Instruct" / "model.safetensors").read_bytes()


def test_the_example_of_embeddings_scores_before_and_after(examples, tmp_path, monkeypatch):
    folder = run(examples["embed"].main, tmp_path / "whole", monkeypatch)
    report = json.loads((folder / "embed.json").read_text())
    assert report["before"].keys() == report["after"].keys() >= {"recall@1", "ndcg@10"}
    assert (folder / "embed" / "epoch_0" / "1_Pooling" / "config.json").is_file()


def test_the_example_with_a_tool_runs_and_writes_its_report(examples, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(examples["agent"], "MAX_NEW_TOKENS", 16)
    folder = run(examples["agent"].main, tmp_path / "whole", monkeypatch)
    report = json.loads((folder / "agent.json").read_text())
    assert report["exact_match"].keys() == {"published", "shown", "trained"}
    assert len(report["conversations"]) == 100
    lines = [json.loads(line) for line in (folder / "agent" / "rollouts.jsonl").read_text().splitlines()]
    assert len(lines) == 3 * 48
    assert all("calculate" in line["prompt"] or line["end"] for line in lines)


def test_the_example_with_pictures_runs_and_shows_them(examples, tmp_path, monkeypatch):
    vision = examples["vision"]
    folder = tmp_path / "quickstart"
    sizes = {"TRAIN": 8, "HELD_OUT": 2, "ALIGN_STEPS": 2, "ALIGN_SIZE": 4, "WIDTH": 24, "WORDS": ("cat", "red")}
    tokens = {"TOKENS": {"<|endoftext|>": "[IMG]"}}
    for name, value in {**sizes, **tokens}.items():
        monkeypatch.setattr(vision, name, value)
    write_checkpoint(folder / "SmolLM2-135M-Instruct", vocab_size=330)
    rows = [[index % 17] * 64 + [index % 10] for index in range(20)]
    (folder / "digits.csv").write_text("".join(",".join(map(str, row)) + "\n" for row in rows))
    run(vision.main, tmp_path, monkeypatch)
    report = json.loads((folder / "vision.json").read_text())
    assert report.keys() == {"before", "after"}
    assert (folder / "vision.html").read_text().count("<img") == 4
    first, last = (load_file(folder / at / "model.safetensors") for at in ("SmolLM2-135M-vision", "vision/epoch_0"))
    changed = {name for name in first if not torch.equal(first[name], last[name])}
    assert any(name.startswith("vision_tower.") for name in changed)
    assert any(name.startswith("language_model.") for name in changed)


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("347 * 82 - 1905", "26549"),
        ("2 ** 9", "Error: only numbers, +, - and *"),
        ("__import__('os')", "Error: only numbers, +, - and *"),
        ("-", "Error: only numbers, +, - and *"),
        ("1.5 + 1", "Error: only numbers, +, - and *"),
    ],
)
def test_the_calculator_computes_and_runs_no_code(expression, result, examples):
    assert examples["calculator"].Calculator().calculate(expression) == result


def test_a_rejected_answer_is_wrong_in_one_field(examples, tmp_path):
    examples["dpo"].write_pairs(FOLDER / "data" / "held_out.jsonl", tmp_path / "pairs.jsonl", seed=2)
    rows = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    assert len(rows) == 120
    values = [json.loads(row["chosen"][0]["content"]) for row in rows]
    wrong_fields = []
    for row, right in zip(rows, values, strict=True):
        rejected = json.loads(row["rejected"][0]["content"])
        assert list(rejected) == list(right)
        assert row["rejected"][0]["content"] == json.dumps(rejected, separators=(",", ":"))
        (field,) = (field for field in right if rejected[field] != right[field])
        assert rejected[field] in [value[field] for value in values]
        wrong_fields.append(field)
    assert all(wrong_fields.count(field) > 15 for field in values[0])


def test_margins_are_those_of_transformers(examples, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    checkpoint = write_checkpoint(tmp_path / "model")
    examples["dpo"].write_pairs(tmp_path / "held_out.jsonl", tmp_path / "pairs.jsonl", seed=2)
    margins = examples["dpo"].margins(checkpoint, tmp_path / "pairs.jsonl", "fp32")
    model, tokenizer = (kind.from_pretrained(checkpoint) for kind in (AutoModelForCausalLM, AutoTokenizer))
    for row, margin in zip((tmp_path / "pairs.jsonl").read_text().splitlines(), margins.tolist(), strict=True):
        row = json.loads(row)
        sums = []
        for answer in (row["chosen"], row["rejected"]):
            text = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
            prompt, new = (
                tokenizer(part, add_special_tokens=False)["input_ids"]
                for part in (text, f"{answer[0]['content']}<|im_end|>")
            )
            log_probs = model(torch.tensor([prompt + new])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
            sums.append(log_probs[range(len(new)), new].sum().item())
        # a difference of two sums of some hundred nats in float32
        assert margin == pytest.approx(sums[0] - sums[1], abs=1e-3)
