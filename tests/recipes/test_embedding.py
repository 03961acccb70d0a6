"""Embedding models in the recipe dpo: the loss of all ranks' passages, and what it refuses."""

import json

import pytest
import torch

from tests.recipes.runs import resume, run_main, start
from tests.tiny import WORDS, read_lines, write_checkpoint, write_lines, write_pairs
from torchtune import load
from torchtune.evaluation import EmbeddingSettings, EvaluationError, evaluate_retrieval, read_retrieval
from torchtune.modules.loss import LossError
from torchtune.utils import UserError

FULL, LORA = "full_dpo_single_device", "lora_dpo_single_device"
ROWS = [
    {
        "query": f"where {word}",
        "positive": f"the {word} sees {WORDS[(i + 3) % len(WORDS)]}",
        "negatives": [f"a {WORDS[(i + 1) % len(WORDS)]} finds"] * (i % 2),
    }
    for i, word in enumerate(WORDS[:12])
]
DATASET = {"_component_": "torchtune.datasets.embedding_dataset", "source": ROWS}
LOSS = {"_component_": "torchtune.rlhf.loss.InfoNCELoss", "temperature": 0.5}
EMBEDDING = {"dataset": DATASET, "loss": LOSS, "collate_fn": "torchtune.data.collate_embedding", "batch_size": 6}


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_losses_follow_a_plain_loop_over_transformers(pooling, tmp_path):
    """With the formula of MultipleNegativesRankingLoss, since sentence-transformers is no dependency of the tests."""
    from transformers import AutoModel

    sgd = {"optimizer": {"_component_": "torch.optim.SGD", "lr": 0.05}, "lr_scheduler": None, "shuffle": False}
    run = start(FULL, tmp_path, **EMBEDDING, **sgd, loss__pooling=pooling)
    model = AutoModel.from_pretrained(tmp_path / "checkpoint", dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    rows = run.recipe.loader.dataset

    def embed(tokens):
        hidden = model(torch.tensor([tokens])).last_hidden_state[0]
        vector = hidden[-1] if pooling == "last" else hidden.mean(0)
        return vector / vector.norm()

    for step in range(2):
        examples = [rows[6 * step + i] for i in range(6)]
        queries = torch.stack([embed(example["query"]) for example in examples])
        passages = [embed(example["positive"]) for example in examples]
        for example in examples:
            passages += [embed(negative) for negative in example["negatives"]]
        logits = queries @ torch.stack(passages).T / 0.5
        loss = torch.nn.functional.cross_entropy(logits, torch.arange(6))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert run.losses[step + 1] == pytest.approx(loss.item(), abs=2e-5)


def test_two_processes_train_as_one(forker, tmp_path):
    """Also if the last step leaves one of them without an example, and if they share sequences."""
    rows = [{**row, "negatives": ["not a bird"]} for row in ROWS[:7]]
    data = write_lines(tmp_path / "retrieval.jsonl", rows)
    dataset = {**DATASET, "source": "json", "data_files": str(data)}
    loss = {**LOSS, "matryoshka_dims": [32, 8]}
    settings = {**EMBEDDING, "dataset": dataset, "loss": loss, "clip_grad_norm": 1.0, "epochs": 2}
    # The output layer is a module of its own, which the loss does not use.
    write_checkpoint(tmp_path / "checkpoint", tied=False)
    full_run = start("full_dpo_single_device", tmp_path, **settings)
    splits = [
        {"data_parallel_shard_dim": 2, "batch_size": 3},
        {"data_parallel_shard_dim": 1, "data_parallel_replicate_dim": 2, "batch_size": 3},
        {"data_parallel_shard_dim": 1, "context_parallel_dim": 2},
    ]
    for split in splits:
        run = forker.run_on_two("full_dpo_distributed", tmp_path, **{**settings, **split})
        assert run.losses == pytest.approx(full_run.losses, rel=1e-4), split
        for figure in ("retrieval/accuracy", "retrieval/mrr", "similarity/positive", "grad_norm"):
            assert run.figure(figure) == pytest.approx(full_run.figure(figure), rel=1e-3), (split, figure)


def test_adapters_learn_to_retrieve_and_resume(tmp_path):
    settings = {**EMBEDDING, "epochs": 4, "save_every_n_steps": 3, "loss": {**LOSS, "matryoshka_dims": [32, 16]}}
    settings |= {"dataset_val": DATASET, "run_val_every_n_steps": 2}
    full_run = start(LORA, tmp_path, **settings)
    assert full_run.losses[8] < full_run.losses[1]
    assert len(full_run.figure("val_retrieval/mrr")) == 4
    resume(LORA, tmp_path, full_run, 3, **settings)


def test_report_measures_groups_of_validation_rows_and_no_answers(tmp_path, caplog):
    """The rows are those of the config, which a check of the settings does not tokenize."""
    settings = {**EMBEDDING, "dataset_val": DATASET, "run_val_every_n_steps": 2, "log_level": "INFO"}
    with caplog.at_level("INFO", logger="torchtune"):
        code, output_dir = run_main(FULL, tmp_path, **settings)
    assert code == 0
    assert f"measure it  tune eval {output_dir / 'epoch_0'} --retrieval corpus.json" in caplog.text
    assert "ask it" not in caplog.text
    measured = [record for record in read_lines(output_dir / "logs" / "run.jsonl") if record["event"] == "measured"]
    assert [record["when"] for record in measured] == ["before", "after"]
    for record in measured:
        assert len(record["values"]) == 2  # groups of four of the twelve rows, 8 of which are measured
        assert not record["answers"]


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_checkpoint_has_the_files_of_sentence_transformers(pooling, tmp_path):
    """In the layout of published models, for example sentence-transformers/all-MiniLM-L6-v2."""
    dataset = {**DATASET, "query_instruction": "query: "}
    loss = {**LOSS, "pooling": pooling}
    run = start(FULL, tmp_path, **{**EMBEDDING, "dataset": dataset, "loss": loss}, max_steps_per_epoch=1)
    folder = run.output_dir / "epoch_0"

    def read(name):
        return json.loads((folder / name).read_text())

    assert read("modules.json") == [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]
    pooling_config = read("1_Pooling/config.json")
    assert pooling_config["word_embedding_dimension"] == 32
    modes = {name for name, value in pooling_config.items() if name.startswith("pooling_mode_") and value}
    assert modes == {{"last": "pooling_mode_lasttoken", "mean": "pooling_mode_mean_tokens"}[pooling]}
    assert (folder / "2_Normalize").is_dir()
    assert read("sentence_bert_config.json") == {"max_seq_length": 128, "do_lower_case": False}
    assert read("config_sentence_transformers.json")["prompts"] == {"query": "query: ", "document": ""}


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        (
            {"batch_size": 11, "dataset": {**DATASET, "source": ROWS[::2] * 2}},
            LossError,
            "the smallest micro-batch has 1",
        ),
        (
            {"collate_fn": "torchtune.data.collate_preference"},
            UserError,
            "set collate_fn=torchtune.data.collate_embedding",
        ),
        (
            {"dataset": {**DATASET, "source": [{"query": word, "positive": "the cat"} for word in WORDS[:8]]}},
            LossError,
            "all 8 examples have the same positive, and no negatives",
        ),
        ({"reference_cache": "x"}, UserError, "needs no reference"),
        ({"loss": {**LOSS, "matryoshka_dims": [64]}}, LossError, "embeddings have 32 dimensions"),
        (
            {"loss": {**LOSS, "texts_per_pass": 4}, "optimizer_in_bwd": True},
            UserError,
            "optimizer_in_bwd: must be False with loss.texts_per_pass",
        ),
        (
            {"loss": {**LOSS, "texts_per_pass": 4}, "context_parallel_dim": 2},
            UserError,
            "context_parallel_dim: must be 1 with loss.texts_per_pass",
        ),
    ],
)
def test_settings_that_do_not_fit_infonce_are_refused_in_one_sentence(settings, error, words, tmp_path):
    with pytest.raises(error, match=words):
        start(FULL, tmp_path, **{**EMBEDDING, **settings}, train=False)


PARTS = {**LOSS, "texts_per_pass": 5, "matryoshka_dims": [32, 8]}
WHOLE = {**LOSS, "matryoshka_dims": [32, 8]}


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        (FULL, {}),
        (FULL, {"enable_activation_checkpointing": True}),
        (LORA, {}),
        (LORA, {"enable_activation_checkpointing": True}),
    ],
)
def test_batch_in_parts_trains_as_in_one_pass(recipe, settings, tmp_path):
    """The gradients of every step are compared by their norm, and by the losses of the steps after it."""
    settings = {**EMBEDDING, **settings, "epochs": 2, "clip_grad_norm": 1.0, "dataset_val": DATASET}
    settings["run_val_every_n_steps"] = 2
    one_pass = start(recipe, tmp_path, **{**settings, "loss": WHOLE})
    parts = start(recipe, tmp_path, **{**settings, "loss": PARTS})
    assert parts.losses == pytest.approx(one_pass.losses, rel=1e-5)
    for figure in ("grad_norm", "val_loss", "retrieval/mrr"):
        assert parts.figure(figure) == pytest.approx(one_pass.figure(figure), rel=1e-4), figure


def test_two_processes_train_in_parts_as_one(forker, tmp_path):
    """The processes have different numbers of texts, and so of parts."""
    rows = [{**row, "negatives": ["not a bird"] * (1 + 2 * (i % 2))} for i, row in enumerate(ROWS[:7])]
    data = write_lines(tmp_path / "retrieval.jsonl", rows)
    dataset = {**DATASET, "source": "json", "data_files": str(data)}
    settings = {**EMBEDDING, "dataset": dataset, "clip_grad_norm": 1.0, "epochs": 2, "shuffle": False}
    write_checkpoint(tmp_path / "checkpoint", tied=False)
    one_process = start("full_dpo_single_device", tmp_path, **{**settings, "loss": WHOLE})
    splits = [
        {"data_parallel_shard_dim": 2, "batch_size": 3},
        {"data_parallel_shard_dim": 1, "tensor_parallel_dim": 2},
    ]
    for split in splits:
        run = forker.run_on_two("full_dpo_distributed", tmp_path, **{**settings, "loss": PARTS, **split})
        assert run.losses == pytest.approx(one_process.losses, rel=1e-4), split
        assert run.figure("grad_norm") == pytest.approx(one_process.figure("grad_norm"), rel=1e-3), split


def test_training_in_parts_resumes(tmp_path):
    settings = {**EMBEDDING, "loss": PARTS, "epochs": 3, "save_every_n_steps": 3}
    settings["model_converters"] = [
        {"_component_": "torchtune.modules.peft.LoRA", "rank": 4, "alpha": 8, "dropout": 0.2}
    ]
    full_run = start(LORA, tmp_path, **settings)
    resume(LORA, tmp_path, full_run, 3, **settings)


BOTH_WAYS = [{"_component_": "torchtune.modules.BidirectionalAttention"}]


def test_attention_in_both_directions_is_trained_and_saved(forker, tmp_path):
    """On two context-parallel ranks as on one; transformers and this library read it from config.json."""
    from transformers import AutoModel

    data = write_lines(tmp_path / "retrieval.jsonl", ROWS)
    dataset = {**DATASET, "source": "json", "data_files": str(data)}
    settings = {**EMBEDDING, "dataset": dataset, "model_converters": BOTH_WAYS, "loss": {**LOSS, "pooling": "mean"}}
    causal = start(FULL, tmp_path, **{**settings, "model_converters": []})
    full_run = start(FULL, tmp_path, **settings)
    assert full_run.losses[1] != pytest.approx(causal.losses[1], rel=1e-4)
    split = {"data_parallel_shard_dim": 1, "context_parallel_dim": 2}
    run = forker.run_on_two("full_dpo_distributed", tmp_path, **{**settings, **split})
    assert run.losses == pytest.approx(full_run.losses, rel=1e-4)

    folder = full_run.output_dir / "epoch_0"
    assert json.loads((folder / "config.json").read_text())["is_causal"] is False
    model, tokenizer = load(folder, device="cpu", dtype="fp32")
    tokens = torch.tensor([tokenizer.encode("the red cat sees", add_bos=True, add_eos=False)])
    reference = AutoModel.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        hidden = model(tokens, output="hidden")
        torch.testing.assert_close(hidden, reference(tokens).last_hidden_state, atol=1e-5, rtol=1e-4)


def test_adapters_of_attention_in_both_directions_resume(tmp_path):
    adapter = {"_component_": "torchtune.modules.peft.LoRA", "rank": 4, "alpha": 8}
    settings = {**EMBEDDING, "model_converters": [adapter, *BOTH_WAYS], "epochs": 3, "save_every_n_steps": 3}
    full_run = start(LORA, tmp_path, **settings)
    for name in ("step_3", "step_6"):  # an adapter beside its base's config, and the merged model
        model, _ = load(full_run.output_dir / name, device="cpu")
        assert not model.description.is_causal
    resume(LORA, tmp_path, full_run, 3, **settings)


def test_corpus_is_measured_in_each_validation(forker, tmp_path):
    """As tune eval measures the checkpoint; the best one is kept, and two ranks have the scores of one."""
    corpus = {
        "queries": {row["positive"]: row["query"] for row in ROWS[:4]},
        "corpus": {row["positive"]: row["positive"] for row in ROWS},
        "relevant": {row["positive"]: [row["positive"]] for row in ROWS[:4]},
    }
    path = tmp_path / "corpus.json"
    path.write_text(json.dumps(corpus))
    data = write_lines(tmp_path / "retrieval.jsonl", ROWS)
    dataset = {**DATASET, "source": "json", "data_files": str(data), "query_instruction": "find "}
    settings = {**EMBEDDING, "dataset": dataset, "dataset_val": dataset, "run_val_every_n_steps": 2, "epochs": 2}
    settings |= {"scores": [f"retrieval:{path}"], "keep_best": "max:val_ndcg@10", "loss": {**LOSS, "pooling": "mean"}}
    run = start(FULL, tmp_path, **settings)
    assert len(run.figure("val_recall@5")) == 2
    folder = run.output_dir / "epoch_1"
    model, tokenizer = load(folder, device="cpu", dtype="fp32")
    scores = evaluate_retrieval(model, tokenizer, read_retrieval(path), settings=EmbeddingSettings.of(folder))
    assert run.figure("val_ndcg@10")[-1] == pytest.approx(scores["ndcg@10"])
    for split in (
        {"data_parallel_shard_dim": 2, "batch_size": 3},
        {"data_parallel_shard_dim": 1, "tensor_parallel_dim": 2},
    ):
        two = forker.run_on_two("full_dpo_distributed", tmp_path, **{**settings, **split})
        assert two.figure("val_ndcg@10") == pytest.approx(run.figure("val_ndcg@10")), split


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"scores": ["retrieval:none.json"]}, EvaluationError, "scores: none.json: there is no such file"),
        ({"scores": ["retrieval:a", "retrieval:b"]}, EvaluationError, "scores: 2 files are named with retrieval:"),
        (
            {"scores": ["retrieval:a"], "keep_best": "val_ndcg@10"},
            UserError,
            "keep_best: would keep the lowest score: set max:val_ndcg@10",
        ),
    ],
)
def test_corpus_that_cannot_be_measured_is_one_sentence(settings, error, words, tmp_path):
    validation = {"dataset_val": DATASET, "run_val_every_n_steps": 2}
    with pytest.raises(error, match=words):
        start(FULL, tmp_path, **{**EMBEDDING, **validation, **settings}, train=False)


def test_corpus_of_a_run_without_embeddings_is_refused(tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", ROWS[:2])
    pairs = {"_component_": "torchtune.datasets.preference_dataset", "source": "json"}
    pairs["data_files"] = str(write_pairs(tmp_path / "pairs.jsonl"))
    validation = {"dataset_val": pairs, "run_val_every_n_steps": 2, "scores": [f"retrieval:{path}"]}
    with pytest.raises(EvaluationError, match="measures embeddings, which DPOLoss does not train"):
        start(FULL, tmp_path, **validation, train=False)
