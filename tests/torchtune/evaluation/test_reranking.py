"""A reranker orders the first texts of a retrieval anew."""

import json

import pytest
import torch

from tests.tiny import write_checkpoint
from torchtune import load
from torchtune.data import RERANKER_FILE
from torchtune.evaluation import EvaluationError, Reranker, RetrievalData, evaluate_reranking
from torchtune.evaluation._retrieval import rerank

DATA = RetrievalData(["who", "why"], ["cat", "dog", "bird", "red"], [[2], [3]])


class ByLength:
    """A reranker that likes short documents."""

    def __init__(self):
        self.pairs = []

    def scores(self, pairs, *, batch_size):
        self.pairs += pairs
        return torch.tensor([-float(len(document)) for _, document in pairs])


def test_only_the_first_texts_are_ordered_anew():
    similarity = torch.tensor([[0.1, 0.9, 0.8, 0.2], [0.4, 0.3, 0.2, 0.1]])
    reranker = ByLength()
    data = RetrievalData(DATA.queries, ["a", "four", "ab", "abc"], DATA.relevant)
    values = rerank(similarity, reranker, data, first=2)
    assert reranker.pairs == [("who", "four"), ("who", "ab"), ("why", "a"), ("why", "four")]
    assert values.argsort(dim=1, descending=True).tolist() == [[2, 1, 3, 0], [0, 1, 2, 3]]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder / "embedder")
    write_checkpoint(folder / "reranker", is_reward=True)
    (folder / "reranker" / RERANKER_FILE).write_text(json.dumps({"template": "{query} {document}", "add_eos": True}))
    return folder


def test_reranking_one_text_changes_nothing(models):
    reranker = Reranker.of(models / "reranker", *load(models / "reranker", device="cpu", dtype="fp32"))
    embedder = load(models / "embedder", device="cpu", dtype="fp32")
    before, after = evaluate_reranking(*embedder, reranker, DATA, first=1)
    assert before == after
    assert reranker.template.add_eos


def test_scores_do_not_depend_on_the_batch(models):
    reranker = Reranker.of(models / "reranker", *load(models / "reranker", device="cpu", dtype="fp32"))
    pairs = [("who", "cat"), ("why not", "a big red dog"), ("a", "b")]
    torch.testing.assert_close(reranker.scores(pairs, batch_size=1), reranker.scores(pairs))


def test_model_that_is_not_a_reranker_is_refused(models, tmp_path):
    embedder = load(models / "embedder", device="cpu", dtype="fp32")
    with pytest.raises(EvaluationError, match=f"there is no {RERANKER_FILE} in it"):
        Reranker.of(models / "embedder", *embedder)
    with pytest.raises(EvaluationError, match="scores a pair with one output, but the model has"):
        Reranker(*embedder)
    (tmp_path / RERANKER_FILE).write_text('{"template": "{query}"}')
    with pytest.raises(EvaluationError, match="it has no template"):
        Reranker.of(tmp_path, *embedder)
