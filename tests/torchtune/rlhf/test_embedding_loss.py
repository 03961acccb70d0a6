"""InfoNCE equals its formula in plain float64.

The formula is that of ``MultipleNegativesRankingLoss`` and ``MatryoshkaLoss`` of ``sentence-transformers``, which is no
dependency of the tests.
"""

import pytest
import torch

from tests.devices import DEVICE
from torchtune.data import DataError, collate_documents, collate_embedding
from torchtune.modules import pooled_embeddings
from torchtune.modules.loss import LossError
from torchtune.rlhf.loss import InfoNCELoss, setup_loss

DOUBLE = torch.float64


def row(query, positive, *negatives, labels=(0,)):
    return {"query": query, "positive": positive, "negatives": list(negatives), "labels": list(labels)}


ROWS = [row([1, 2], [3, 4, 5], [6]), row([7], [8, 9], [10, 11], [12]), row([13, 14, 15], [16])]


def vectors(count, width=6):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, width, dtype=DOUBLE, generator=generator).requires_grad_()


def expected_loss(queries, passages, temperature):
    """Sum over queries; the positive of query i is passage i."""
    total = 0.0
    for index, query in enumerate(queries):
        cosines = [query @ passage / (query.norm() * passage.norm()) for passage in passages]
        logits = torch.stack(cosines) / temperature
        total = total + logits.exp().sum().log() - logits[index]
    return total


def test_loss_and_gradient_equal_the_formula():
    batch = collate_embedding(ROWS).to(DEVICE)
    scores = vectors(batch.num_documents)
    total, metrics = InfoNCELoss(temperature=0.2).sum_and_metrics(batch, scores)
    expected = expected_loss(scores[:3], scores[3:], 0.2)
    torch.testing.assert_close(total, expected)
    (grad,) = torch.autograd.grad(total, scores)
    (expected_grad,) = torch.autograd.grad(expected, scores)
    torch.testing.assert_close(grad, expected_grad)
    assert batch.num_terms == 3
    assert metrics["retrieval/accuracy"][1] == 3


def test_matryoshka_dimensions_are_a_weighted_sum_of_losses():
    batch = collate_embedding(ROWS).to(DEVICE)
    scores = vectors(batch.num_documents)
    loss = InfoNCELoss(temperature=0.2, matryoshka_dims=[6, 3, 2], matryoshka_weights=[1.0, 0.5, 0.25])
    total, _ = loss.sum_and_metrics(batch, scores)
    expected = 0.0
    for dim, weight in ((6, 1.0), (3, 0.5), (2, 0.25)):
        expected = expected + weight * expected_loss(scores[:3, :dim], scores[3:, :dim], 0.2)
    torch.testing.assert_close(total, expected)


def test_metrics_rank_the_positive_among_all_passages():
    batch = collate_embedding([row([1], [2]), row([3], [4])]).to(DEVICE)
    scores = torch.tensor([[1.0, 0.0], [0.9, 0.1], [1.0, 0.0], [1.0, 0.1]])  # two queries, two positives
    _, metrics = InfoNCELoss().sum_and_metrics(batch, scores)
    assert metrics["retrieval/accuracy"] == (2, 2)
    _, metrics = InfoNCELoss().sum_and_metrics(batch, scores[[0, 1, 3, 2]])
    assert metrics["retrieval/accuracy"] == (0, 2)
    assert metrics["retrieval/mrr"] == (1.0, 2)


def test_copy_of_a_positive_is_no_negative():
    """Two queries with the same positive: each would otherwise be driven away from its own."""
    batch = collate_embedding([row([1], [5, 6]), row([2], [5, 6]), row([3], [7])]).to(DEVICE)
    scores = vectors(6).detach()
    scores[4] = scores[3]
    total, _ = InfoNCELoss(temperature=0.2).sum_and_metrics(batch, scores)
    expected = expected_loss(scores[:1], scores[[3, 5]], 0.2)
    expected = expected + expected_loss(scores[1:2], scores[[4, 5]], 0.2)
    expected = expected + expected_loss(scores[2:3], scores[[5, 3, 4]], 0.2)
    torch.testing.assert_close(total, expected)


def test_filler_of_a_rank_without_data_adds_nothing():
    filler = row([1], [2], [3], labels=[-100])
    batch = collate_embedding([*ROWS[:2], filler]).to(DEVICE)
    assert batch.num_terms == 2
    # Documents: 3 queries, 3 positives, negatives of rows 0, 1, 1 and of the filler.
    scores = vectors(10)
    total, metrics = InfoNCELoss(temperature=0.2).sum_and_metrics(batch, scores)
    torch.testing.assert_close(total, expected_loss(scores[:2], scores[[3, 4, 6, 7, 8]], 0.2))
    (grad,) = torch.autograd.grad(total, scores)
    assert not grad[[2, 5, 9]].any()
    assert metrics["retrieval/accuracy"][1] == 2


def test_pooling_reads_the_last_token_or_the_mean_of_a_document():
    batch = collate_documents([{"tokens": [1, 2, 3], "labels": [-100] * 3}, {"tokens": [4], "labels": [-100]}])
    hidden = torch.arange(8.0).view(1, 4, 2)
    assert pooled_embeddings(hidden, batch, "last").tolist() == [[4.0, 5.0], [6.0, 7.0]]
    assert pooled_embeddings(hidden, batch, "mean").tolist() == [[2.0, 3.0], [6.0, 7.0]]


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_pooling_over_shards_of_a_sequence_adds_up(pooling):
    batch = collate_embedding(ROWS).pad_to_multiple(2).to(DEVICE)
    hidden = torch.randn(1, batch.num_tokens, 4)
    whole = pooled_embeddings(hidden, batch, pooling)
    half = batch.num_tokens // 2
    parts = [
        pooled_embeddings(hidden[:, rank * half : (rank + 1) * half], batch.split(rank, 2), pooling)
        for rank in range(2)
    ]
    torch.testing.assert_close(parts[0] + parts[1], whole)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temperature": 0}, "temperature is 0"),
        ({"pooling": "first"}, "pooling is 'first'"),
        ({"matryoshka_dims": [4, 0]}, "must be above 0"),
        ({"matryoshka_dims": [4, 2], "matryoshka_weights": [1.0]}, "1 weights for 2 matryoshka_dims"),
    ],
)
def test_settings_out_of_range_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        InfoNCELoss(**settings)


def test_dimensions_beyond_the_model_are_refused():
    model = torch.nn.Module()
    model.tok_embeddings = torch.nn.Embedding(7, 4)
    with pytest.raises(LossError, match="matryoshka_dims has 8, but the model's embeddings have 4"):
        setup_loss(InfoNCELoss(matryoshka_dims=[8, 2]), model)


def test_batch_without_roles_is_refused():
    batch = collate_documents([{"tokens": [1], "labels": [-100]}])
    with pytest.raises(DataError, match=r"use torchtune\.datasets\.embedding_dataset"):
        InfoNCELoss().check_batch(batch)
