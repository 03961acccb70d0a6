"""Classifiers in the recipes of supervised fine-tuning."""

import json

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import torchtune
from tests.devices import DEVICE
from tests.recipes.runs import load_recipe, resume, start, write_config
from tests.tiny import write_checkpoint, write_lines
from torchtune.checkpoints import CheckpointError
from torchtune.config import load_and_check
from torchtune.estimate import plan_data
from torchtune.modules import classifier_model
from torchtune.reports import RunFolder
from torchtune.training import ClassificationError
from torchtune.utils import UserError

TEXTS = {"animal": ["the cat sees", "a dog", "one bird"], "color": ["red", "a big green", "blue"], "why": ["why not"]}
ROWS = []
for label, label_texts in TEXTS.items():
    for text in label_texts:
        ROWS += [{"text": f"{text} {number}", "label": label} for number in "12"]


def settings_of(folder, **settings):
    """Settings of a run that trains a classifier, on rows in a file, and validates on them."""
    checkpoint = folder / "checkpoint"
    if not checkpoint.exists():
        write_checkpoint(checkpoint)
    data = {
        "_component_": "torchtune.datasets.classification_dataset",
        "source": "json",
        "data_files": str(write_lines(folder / "labels.jsonl", ROWS)),
    }
    model = {
        "_component_": "torchtune.modules.classifier_model",
        "num_classes": 3,
        "base_model_path": "torchtune.models.from_hf_config",
        "checkpoint_dir": str(checkpoint),
    }
    return {
        "dataset": data,
        "dataset_val": data,
        "run_val_every_n_steps": 2,
        "model": model,
        "loss": {"_component_": "torchtune.modules.loss.ClassificationLoss"},
        "epochs": 3,
        **settings,
    }


def test_classifier_is_read_by_transformers_and_the_best_is_kept(tmp_path):
    settings = settings_of(tmp_path, keep_best="max:val_accuracy", batch_size=4)
    run = start("full_finetune_single_device", tmp_path, **settings)
    best = RunFolder(run.output_dir).best
    accuracies = run.figure("val_accuracy")
    assert best["value"] == max(accuracies) > 0.7
    assert len(run.figure("val_f1")) == len(accuracies) == 6
    folder = run.output_dir / best["checkpoint"]
    reference = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    assert reference.config.id2label == {0: "animal", 1: "color", 2: "why"}
    assert reference.config.label2id == {"animal": 0, "color": 1, "why": 2}
    assert reference.config.problem_type == "single_label_classification"
    model, tokenizer = torchtune.load(folder, dtype="fp32", device=DEVICE)
    texts = [row["text"] for row in ROWS]
    for text, classes in zip(texts, torchtune.classify(model, tokenizer, texts), strict=True):
        tokens = torch.tensor([tokenizer.encode(text, add_eos=False)])
        with torch.no_grad():
            probabilities = reference(tokens).logits.softmax(-1)[0].tolist()
        named = dict(zip(TEXTS, probabilities, strict=True))
        assert classes == pytest.approx(named, abs=1e-5)
        assert list(classes) == sorted(named, key=named.get, reverse=True)
    data = torchtune.datasets.classification_dataset(tokenizer, ROWS)
    report = torchtune.evaluation.evaluate_classifier(model, data)
    assert report.scores["accuracy"] == best["value"]


@pytest.mark.slow
def test_two_ranks_train_and_validate_as_one(forker, tmp_path):
    settings = settings_of(tmp_path)
    alone = start("full_finetune_single_device", tmp_path, **settings, batch_size=4)
    both = forker.run_on_two("full_finetune_distributed", tmp_path, **settings, batch_size=2, log_level="INFO")
    assert both.losses == pytest.approx(alone.losses, rel=1e-4)
    for name in ("val_loss", "val_accuracy", "val_f1"):
        assert both.figure(name) == pytest.approx(alone.figure(name), rel=1e-4)


def test_resumed_run_goes_on_with_the_same_bits(tmp_path):
    settings = settings_of(tmp_path, batch_size=4, save_every_n_steps=4)
    full_run = start("full_finetune_single_device", tmp_path, **settings)
    resumed = resume("full_finetune_single_device", tmp_path, full_run, 4, **settings)
    assert resumed.figure("val_f1") == full_run.figure("val_f1")[2:]


def test_adapter_of_a_trained_classifier_is_trained(tmp_path):
    settings = settings_of(tmp_path, batch_size=4)
    full_run = start("full_finetune_single_device", tmp_path, **settings)
    source = {**settings["model"], "checkpoint_dir": str(full_run.output_dir / "epoch_0")}
    run = start(
        "lora_finetune_single_device",
        tmp_path,
        **settings | {"model": source},
        checkpointer__checkpoint_dir=str(full_run.output_dir / "epoch_0"),
    )
    assert run.losses[6] < run.losses[1]
    merged, tokenizer = torchtune.load(run.output_dir / "epoch_2", dtype="fp32", device=DEVICE)
    data = torchtune.datasets.classification_dataset(tokenizer, ROWS)
    scores = torchtune.evaluation.evaluate_classifier(merged, data).scores
    assert scores["accuracy"] == pytest.approx(run.figure("val_accuracy")[-1])


def test_adapter_beside_a_new_head_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="output layer would be new and, under an adapter, never trained"):
        start("lora_finetune_single_device", tmp_path, **settings_of(tmp_path), train=False)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.num_classes=2"], "the labels have 3 classes .animal, color, why., but the model's head has 2"),
        (["loss._component_=torchtune.modules.loss.LinearCrossEntropyLoss"], "LinearCrossEntropyLoss predicts tokens"),
        (["dataset.split=train[:4]", "dataset_val.split=train[:4]"], "all rows have the class .animal."),
    ],
)
def test_labels_are_checked_before_the_run(overrides, message, tmp_path):
    config = write_config("full_finetune_single_device", tmp_path, tmp_path / "out", **settings_of(tmp_path))
    main = load_recipe("full_finetune_single_device", tmp_path).recipe_main
    assert plan_data(load_and_check(config, ["epochs=1"], main))
    with pytest.raises(ClassificationError, match=message):
        plan_data(load_and_check(config, overrides, main))


@pytest.mark.parametrize("pad_token", [None, "<|im_end|>"])
def test_batches_with_padding_are_classified_by_transformers_alike(pad_token, tmp_path):
    """Also if the files of the base name no padding token, or if its tokenizer pads with EOS."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    for name, field in (("config.json", "pad_token_id"), ("tokenizer_config.json", "pad_token")):
        content = json.loads((checkpoint / name).read_text())
        content.pop(field, None)
        if pad_token is not None and name == "tokenizer_config.json":
            content[field] = pad_token
        (checkpoint / name).write_text(json.dumps(content))
    run = start("full_finetune_single_device", tmp_path, **settings_of(tmp_path, epochs=1))
    folder = run.output_dir / "epoch_0"
    reference = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    padding = AutoTokenizer.from_pretrained(folder)
    texts = ["the cat sees a dog", "red", "one bird", "why not"]
    batch = padding(texts, padding=True, add_special_tokens=False, return_tensors="pt")
    assert not batch["attention_mask"].all()
    with torch.no_grad():
        probabilities = reference(**batch).logits.softmax(-1)
    model, tokenizer = torchtune.load(folder, dtype="fp32", device="cpu")
    for row, classes in zip(probabilities.tolist(), torchtune.classify(model, tokenizer, texts), strict=True):
        assert classes == pytest.approx(dict(zip(TEXTS, row, strict=True)), abs=1e-5)


def test_rows_are_shown_with_their_labels(tmp_path, tune):
    settings_of(tmp_path)
    component = "_component_=torchtune.datasets.classification_dataset"
    output = tune(
        "data", "show", str(tmp_path / "labels.jsonl"), component, "--tokenizer", str(tmp_path / "checkpoint")
    )
    assert "3 classes in 14 rows (single_label_classification): animal 6, color 6, why 2" in output.out
    assert "label 'animal'\nthe cat sees 1\n" in output.out


def test_classifier_is_measured_on_a_file(tmp_path, tune):
    run = start("full_finetune_single_device", tmp_path, **settings_of(tmp_path, batch_size=4))
    output = tmp_path / "eval"
    done = tune("eval", str(run.output_dir), "--data", str(tmp_path / "labels.jsonl"), "--output", str(output))
    assert done.code == 0
    (result,) = json.loads((output / "labels.results.json").read_text())["models"]
    assert result["scores"]["accuracy"] == pytest.approx(run.figure("val_accuracy")[-1])
    assert result["loss"] == pytest.approx(run.figure("val_loss")[-1], rel=1e-4)
    other_file = write_lines(tmp_path / "other.jsonl", [{"text": "a fish", "label": "fish"}])
    refused = tune("eval", str(run.output_dir), "--data", str(other_file), "--output", str(output))
    assert "other.jsonl, row 0: the class 'fish' is not one of animal, color, why: correct the row" in refused.err


def test_language_model_has_no_classes(tmp_path):
    model, tokenizer = torchtune.load(write_checkpoint(tmp_path / "checkpoint"), dtype="fp32", device=DEVICE)
    with pytest.raises(UserError, match="it predicts tokens and has no classes"):
        torchtune.classify(model, tokenizer, "the cat")


def test_reward_model_gives_a_number(tmp_path):
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    _, tokenizer = torchtune.load(checkpoint, device="cpu")
    model = classifier_model(1, "torchtune.models.from_hf_config", checkpoint_dir=str(checkpoint))
    tokens = torch.tensor([tokenizer.encode("the cat", add_eos=False)])
    assert torchtune.classify(model, tokenizer, "the cat") == pytest.approx(model(tokens)[0, -1].item(), abs=1e-5)
