"""Scores of rankings by hand, and what is read as a corpus.

The scores are defined as those of ``InformationRetrievalEvaluator`` of ``sentence-transformers``, which is no
dependency of the tests: binary gains, ``mrr@10`` of the first relevant text, recall as a fraction of the relevant ones.
"""

import json
import math

import pytest
import torch

from tests.devices import DEVICE
from tests.tiny import write_checkpoint, write_lines
from torchtune import embed, load
from torchtune.evaluation import (
    EmbeddingSettings,
    EvaluationError,
    RetrievalData,
    evaluate_retrieval,
    read_retrieval,
    retrieval_scores,
)

CORPUS = {
    "queries": {"q1": "the cat", "q2": "a red dog"},
    "corpus": {"a": "the cat", "b": "one dog", "c": "big red dog finds a bird"},
    "relevant": {"q1": ["a"], "q2": ["c", "b"]},
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint")
    return load(folder, dtype="fp32", device=DEVICE)


def test_scores_equal_their_definitions():
    # Query 0 has its only relevant text at rank 2; query 1 has three, at ranks 1, 3 and 12.
    similarities = -torch.arange(12.0).repeat(2, 1)
    scores = retrieval_scores(similarities, [[1], [0, 2, 11]], recall_at=[1, 3, 10])
    ideal = 1 + 1 / math.log2(3) + 1 / math.log2(4)
    assert scores == {
        "ndcg@10": pytest.approx((1 / math.log2(3) + (1 + 1 / math.log2(4)) / ideal) / 2),
        "mrr@10": pytest.approx((1 / 2 + 1) / 2),
        "recall@1": pytest.approx((0 + 1 / 3) / 2),
        "recall@3": pytest.approx((1 + 2 / 3) / 2),
        "recall@10": pytest.approx((1 + 2 / 3) / 2),
    }


def test_relevant_text_below_rank_10_has_no_gain():
    scores = retrieval_scores(-torch.arange(12.0)[None], [[10]])
    assert (scores["ndcg@10"], scores["mrr@10"], scores["recall@10"]) == (0.0, 0.0, 0.0)


def test_object_with_ids_and_rows_are_read(tmp_path):
    path = tmp_path / "corpus.json"
    path.write_text(json.dumps(CORPUS))
    data = read_retrieval(path)
    assert data == RetrievalData(["the cat", "a red dog"], list(CORPUS["corpus"].values()), [[0], [2, 1]])
    rows = [
        {"query": "who", "positive": "cat", "negatives": ["dog", "bird"]},
        {"query": "who", "positive": "big cat"},
        {"query": "why", "positive": "dog", "negatives": "cat"},
    ]
    data = read_retrieval(write_lines(tmp_path / "rows.jsonl", rows))
    assert data == RetrievalData(["who", "why"], ["cat", "dog", "bird", "big cat"], [[0, 3], [1]])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"relevant": {"q9": ["a"]}}, "query 'q9', which is not in 'queries'"),
        ({"relevant": {"q1": ["z"]}}, "'z', which is not in 'corpus'"),
        ({"relevant": {"q1": []}}, "has nothing: leave it out"),
        ({"corpus": ["the cat"]}, "'corpus' must map ids to texts"),
        ({"corpus": None}, "there is no 'corpus'"),
    ],
)
def test_file_with_unknown_ids_is_refused(change, words, tmp_path):
    content = {name: value for name, value in {**CORPUS, **change}.items() if value is not None}
    path = tmp_path / "corpus.json"
    path.write_text(json.dumps(content))
    with pytest.raises(EvaluationError, match=words):
        read_retrieval(path)


def test_rows_of_another_format_are_refused(tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", [{"prompt": "2 + 2", "answer": "4"}])
    with pytest.raises(EvaluationError, match="row 1 is prompts with answers: give an object with queries"):
        read_retrieval(path)
    with pytest.raises(EvaluationError, match="there is no such file"):
        read_retrieval(tmp_path / "other.json")


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_equal_those_of_each_text_alone(pooling, loaded):
    model, tokenizer = loaded
    texts = ["the cat", "a red dog finds", "one"]
    vectors = embed(model, tokenizer, texts, pooling=pooling, instruction="query: ", batch_size=2)
    for text, vector in zip(texts, vectors, strict=True):
        tokens = torch.tensor([tokenizer.encode("query: " + text, add_eos=False)])
        with torch.no_grad():
            hidden = model(tokens, output="hidden")[0].cpu()
        pooled = hidden[-1] if pooling == "last" else hidden.mean(0)
        torch.testing.assert_close(vector, pooled / pooled.norm(), atol=1e-5, rtol=0)
        (short,) = embed(model, tokenizer, [text], pooling=pooling, instruction="query: ", dimensions=8)
        torch.testing.assert_close(short, pooled[:8] / pooled[:8].norm(), atol=1e-5, rtol=0)


def test_text_retrieves_itself(loaded):
    texts = ["the cat", "one dog", "a red bird"]
    data = RetrievalData(texts, texts, [[0], [1], [2]])
    scores = evaluate_retrieval(*loaded, data)
    assert set(scores.values()) == {1.0}


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"embedding_dimension": 32, "pooling_mode": "lasttoken"}, "last"),  # as of sentence-transformers 6
    ],
)
def test_pooling_and_instructions_are_read_from_a_checkpoint(config, pooling, tmp_path):
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "query: "}}))
    assert EmbeddingSettings.of(tmp_path) == EmbeddingSettings(pooling, "query: ", "")


def test_pooling_that_is_not_supported_is_refused(tmp_path):
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    with pytest.raises(EvaluationError, match="it pools by pooling_mode_cls_token"):
        EmbeddingSettings.of(tmp_path)
