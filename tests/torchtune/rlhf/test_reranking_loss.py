"""Losses of rerankers equal their formulas in plain float64, and those of sentence-transformers where it is there."""

import itertools

import pytest
import torch

from tests.devices import DEVICE
from torchtune.data import DataError, collate_documents, collate_reranking
from torchtune.modules.loss import LossError
from torchtune.rlhf.loss import RerankBCELoss, RerankListwiseLoss, setup_loss

DOUBLE = torch.float64
TARGETS = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.5, 0.0]]


def example(targets, labels=(0,)):
    return {"documents": [[1, 2]] * len(targets), "targets": list(targets), "labels": list(labels)}


def collate(examples):
    return collate_reranking(examples).to(DEVICE)


def random_scores(count):
    return torch.randn(count, dtype=DOUBLE, generator=torch.Generator().manual_seed(0)).requires_grad_()


def assert_equal_with_gradient(total, expected, scores):
    torch.testing.assert_close(total, expected)
    (grad,) = torch.autograd.grad(total, scores)
    (expected_grad,) = torch.autograd.grad(expected, scores)
    torch.testing.assert_close(grad, expected_grad)


def test_pairs_have_the_binary_cross_entropy():
    targets = [1.0, 0.0, 0.25]
    batch = collate([example([target]) for target in targets])
    scores = random_scores(3)
    total, metrics = RerankBCELoss(positive_weight=2.0).sum_and_metrics(batch, scores)
    expected = 0.0
    for score, target in zip(scores, targets, strict=True):
        p = 1 / (1 + (-score).exp())
        expected = expected - 2.0 * target * p.log() - (1 - target) * (1 - p).log()
    assert_equal_with_gradient(total, expected, scores)
    assert batch.num_terms == metrics["reranking/accuracy"][1] == 3


@pytest.mark.parametrize("targets", ["labels", "softmax"])
def test_lists_have_the_cross_entropy_of_the_candidates(targets):
    batch = collate([example(labels) for labels in TARGETS])
    scores = random_scores(7)
    total, _ = RerankListwiseLoss(temperature=0.5, targets=targets).sum_and_metrics(batch, scores)
    expected = 0.0
    for labels, list_scores in zip(TARGETS, scores.split([3, 4]), strict=True):
        labels = torch.tensor(labels, dtype=DOUBLE)
        p = labels.softmax(0) if targets == "softmax" else labels / labels.sum()
        expected = expected - (p * (list_scores / 0.5).log_softmax(0)).sum()
    assert_equal_with_gradient(total, expected, scores)
    assert batch.num_terms == 2


def test_metrics_rank_the_best_positive_of_a_query():
    batch = collate([example(labels) for labels in TARGETS])
    # The positive of the first query is the second; of the two of the second query, one is the first.
    scores = torch.tensor([0.5, 1.0, 0.0, 0.0, -1.0, 2.0, 1.0])
    _, metrics = RerankListwiseLoss().sum_and_metrics(batch, scores)
    assert metrics["reranking/accuracy"] == (1, 2)
    assert metrics["reranking/mrr"] == (1.5, 2)


@pytest.mark.parametrize(("loss", "size"), [(RerankBCELoss(), 1), (RerankListwiseLoss(), 3)])
def test_filler_of_a_rank_without_data_adds_nothing(loss, size):
    real = example(TARGETS[0][:size])
    scores = random_scores(2 * size)
    batch = collate([real, example(TARGETS[0][:size], labels=[-100])])
    total, metrics = loss.sum_and_metrics(batch, scores)
    expected, _ = loss.sum_and_metrics(collate([real]), scores[:size])
    torch.testing.assert_close(total, expected)
    (grad,) = torch.autograd.grad(total, scores)
    assert not grad[size:].any()
    assert batch.num_terms == metrics["reranking/accuracy"][1] == 1


class Scorer(torch.nn.Module):
    """Stands for a cross encoder: returns one score after the other."""

    num_labels = 1
    device = torch.device(DEVICE)

    def __init__(self, scores):
        super().__init__()
        self._scores = scores

    def preprocess(self, pairs, **_):
        return {"number": torch.tensor([int(document) for _, document in pairs])}

    def forward(self, features):
        return {"scores": self._scores[features["number"], None]}


def test_losses_equal_those_of_sentence_transformers(monkeypatch):
    cross_encoder = pytest.importorskip("sentence_transformers.cross_encoder", reason="it is not installed")
    losses = cross_encoder.losses
    for name in ("binary_cross_entropy", "list_net", "multiple_negatives_ranking"):
        module = __import__(f"sentence_transformers.cross_encoder.losses.{name}", fromlist=["CrossEncoder"])
        monkeypatch.setattr(module, "CrossEncoder", Scorer)
    scores = random_scores(7).detach().float().requires_grad_()
    model = Scorer(scores)
    queries = [["q"] * 7, [str(number) for number in range(7)]]
    flat = list(itertools.chain.from_iterable(TARGETS))
    expected = losses.BinaryCrossEntropyLoss(model)(queries, torch.tensor(flat))
    batch = collate([example([label]) for label in flat])
    total, _ = RerankBCELoss().sum_and_metrics(batch, scores)
    assert_equal_with_gradient(total / batch.num_terms, expected, scores)

    lists = [["q", "r"], [["0", "1", "2"], ["3", "4", "5", "6"]]]
    expected = losses.ListNetLoss(model)(lists, [torch.tensor(labels) for labels in TARGETS])
    batch = collate([example(labels) for labels in TARGETS])
    total, _ = RerankListwiseLoss(targets="softmax").sum_and_metrics(batch, scores)
    assert_equal_with_gradient(total / batch.num_terms, expected, scores)

    expected = losses.MultipleNegativesRankingLoss(model, scale=10.0, activation_fn=None)([["q"], ["0"], ["1"]], None)
    batch = collate([example([1.0, 0.0])])
    total, _ = RerankListwiseLoss(temperature=0.1).sum_and_metrics(batch, scores[:2])
    assert_equal_with_gradient(total, expected, scores)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: RerankBCELoss(positive_weight=0), "positive_weight is 0"),
        (lambda: RerankListwiseLoss(temperature=-1), "temperature is -1"),
        (lambda: RerankListwiseLoss(targets="ranks"), "targets is 'ranks'"),
    ],
)
def test_settings_out_of_range_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_language_model_is_refused():
    model = torch.nn.Module()
    model.output = torch.nn.Linear(4, 7)
    with pytest.raises(LossError, match="needs a model with one output, but this one has 7"):
        setup_loss(RerankBCELoss(), model)


def test_batch_without_targets_is_refused():
    with pytest.raises(DataError, match=r"use torchtune\.datasets\.reranking_dataset"):
        RerankBCELoss().check_batch(collate_documents([{"tokens": [1], "labels": [-100]}]))
