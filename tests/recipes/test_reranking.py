"""Rerankers in the recipe dpo: pairs and lists of candidates, on one rank and two, and their checkpoints."""

import json

import pytest
import torch

from tests.recipes.runs import resume, start
from tests.tiny import WORDS, write_lines
from torchtune import load
from torchtune.data import DataError
from torchtune.evaluation import Reranker
from torchtune.modules.loss import LossError

FULL, LORA = "full_dpo_single_device", "lora_dpo_single_device"
ROWS = [
    {
        "query": f"where {word}",
        "positive": f"the {word} sees {WORDS[(i + 3) % len(WORDS)]}",
        "negatives": [f"a {WORDS[(i + 1) % len(WORDS)]} finds", "not why"][: 1 + i % 2],
    }
    for i, word in enumerate(WORDS[:7])
]
TEMPLATE = "{query}? {document}<|im_end|>"
LANGUAGE_MODEL = {"_component_": "torchtune.models.from_hf_config"}
PREFERENCE = {"collate_fn": "torchtune.data.collate_preference"}
PAIRS, LISTS = "RerankBCELoss", "RerankListwiseLoss"


def settings_of(loss, folder, **dataset):
    data = write_lines(folder / "candidates.jsonl", ROWS)
    node = {"_component_": "torchtune.datasets.reranking_dataset", "source": "json", "data_files": str(data)}
    node |= {"template": TEMPLATE, "listwise": loss == LISTS, **dataset}
    model = {
        "_component_": "torchtune.modules.classifier_model",
        "num_classes": 1,
        "base_model_path": "torchtune.models.from_hf_config",
        "checkpoint_dir": str(folder / "checkpoint"),
    }
    return {
        "model": model,
        "dataset": node,
        "collate_fn": "torchtune.data.collate_reranking",
        "loss": {"_component_": f"torchtune.rlhf.loss.{loss}"},
        "batch_size": 4,
    }


@pytest.mark.parametrize("loss", [PAIRS, LISTS])
def test_two_processes_train_as_one(loss, forker, tmp_path):
    """Also if the last step leaves one of them without an example."""
    settings = {**settings_of(loss, tmp_path), "clip_grad_norm": 1.0, "epochs": 2}
    full_run = start(FULL, tmp_path, **settings)
    split = {"data_parallel_shard_dim": 2, "batch_size": 2}
    run = forker.run_on_two("full_dpo_distributed", tmp_path, **{**settings, **split})
    assert run.losses == pytest.approx(full_run.losses, rel=1e-4)
    for figure in ("reranking/accuracy", "grad_norm"):
        assert run.figure(figure) == pytest.approx(full_run.figure(figure), rel=1e-3), figure


@pytest.mark.parametrize("loss", [PAIRS, LISTS])
def test_adapters_with_a_whole_head_learn_and_resume(loss, tmp_path):
    settings = settings_of(loss, tmp_path)
    adapter = {"_component_": "torchtune.modules.peft.LoRA", "rank": 4, "alpha": 8, "train_modules": ["score"]}
    settings |= {"model_converters": [adapter], "epochs": 4, "max_steps_per_epoch": 2, "save_every_n_steps": 3}
    settings |= {"dataset_val": settings["dataset"], "run_val_every_n_steps": 2}
    full_run = start(LORA, tmp_path, **settings)
    assert full_run.losses[max(full_run.losses)] < full_run.losses[1]
    assert len(full_run.figure("val_reranking/accuracy")) == len(full_run.losses) // 2
    resume(LORA, tmp_path, full_run, 3, **settings)


def test_checkpoint_scores_pairs_as_transformers(tmp_path):
    """With padding, which ``…ForSequenceClassification`` has to know."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    run = start(FULL, tmp_path, **settings_of(PAIRS, tmp_path))
    folder = run.output_dir / "epoch_0"
    reranker = Reranker.of(folder, *load(folder, device="cpu", dtype="fp32"))
    pairs = [("where red", "the red sees two"), ("where cat", "a dog")]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [f"{query}? {document}<|im_end|>" for query, document in pairs]
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)(**inputs).logits
    assert logits.shape == (2, 1)
    torch.testing.assert_close(reranker.scores(pairs), logits[:, 0], atol=1e-5, rtol=0)


def test_checkpoint_is_a_cross_encoder(tmp_path):
    run = start(FULL, tmp_path, **settings_of(PAIRS, tmp_path))
    folder = run.output_dir / "epoch_0"
    content = json.loads((folder / "config_sentence_transformers.json").read_text())
    assert (content["model_type"], content["activation_fn"]) == ("CrossEncoder", "torch.nn.modules.linear.Identity")
    sentence_transformers = pytest.importorskip("sentence_transformers", reason="it is not installed")
    pairs = [("where red", "the red sees two"), ("where cat", "a dog")]
    scores = Reranker.of(folder, *load(folder, device="cpu", dtype="fp32")).scores(pairs)
    predicted = sentence_transformers.CrossEncoder(str(folder), device="cpu").predict(pairs)
    assert predicted == pytest.approx(scores.numpy(), abs=1e-5)


@pytest.mark.parametrize(
    ("loss", "settings", "dataset", "error", "words"),
    [
        (PAIRS, {}, {"listwise": True}, LossError, "needs pairs as examples: set dataset.listwise=False"),
        (LISTS, {}, {"listwise": False}, LossError, "needs queries with all their candidates as examples"),
        (
            PAIRS,
            PREFERENCE,
            {},
            DataError,
            r"set collate_fn=torchtune\.data\.collate_rerank",
        ),
        (
            PAIRS,
            {"model": {**LANGUAGE_MODEL, "checkpoint_dir": "${checkpointer.checkpoint_dir}"}},
            {},
            LossError,
            "needs a model with one output",
        ),
    ],
)
def test_parts_that_do_not_fit_are_one_sentence(loss, settings, dataset, error, words, tmp_path):
    with pytest.raises(error, match=words):
        start(FULL, tmp_path, **{**settings_of(loss, tmp_path, **dataset), **settings}, train=False)
