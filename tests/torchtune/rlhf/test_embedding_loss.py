"""InfoNCE equals its formula in plain float64.

The formula is that of ``MultipleNegativesRankingLoss`` and ``MatryoshkaLoss`` of ``sentence-transformers``, which is no
dependency of the tests.
"""

import pytest
import torch

from tests.devices import DEVICE, random_state
from torchtune.data import BatchLoader, DataError, collate_documents, collate_embedding
from torchtune.models import Description, build
from torchtune.modules import pooled_embeddings
from torchtune.modules.conversion import apply_conversions
from torchtune.modules.loss import LossError
from torchtune.modules.moe import BalancingLoss
from torchtune.modules.peft import LoRA, LoRALinear
from torchtune.rlhf.loss import InfoNCELoss, setup_loss

DOUBLE = torch.float64
DECODER = {"vocab_size": 20, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "embed_dim": 16}
DECODER |= {"intermediate_dim": 16, "max_seq_len": 16, "tie_word_embeddings": True}


def row(query, positive, *negatives, labels=(0,)):
    return {"query": query, "positive": positive, "negatives": list(negatives), "labels": list(labels)}


ROWS = [row([1, 2], [3, 4, 5], [6]), row([7], [8, 9], [10, 11], [12]), row([13, 14, 15], [16])]


def load(rows, batch_size):
    return BatchLoader(rows, batch_size=batch_size, collate_fn=collate_embedding, shuffle=False, seed=0)


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


@pytest.mark.parametrize("rows", [ROWS, ROWS[::-1]], ids=["last", "first"])
def test_row_without_negatives_is_refused_where_it_may_be_alone(rows):
    """Its loss is 0 whatever the model is. Each of the others has negatives."""
    words = "^batch_size: .* the smallest micro-batch has 1, and 1 of the examples have no negatives"
    for batch_size in (1, 2):
        with pytest.raises(LossError, match=words):
            InfoNCELoss().check_loader(load(rows, batch_size), "batch_size")
    InfoNCELoss().check_loader(load(rows, 3), "batch_size")


def test_rows_with_negatives_may_be_alone():
    InfoNCELoss().check_loader(load(ROWS[:2], 1), "batch_size")


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
    full_vectors = pooled_embeddings(hidden, batch, pooling)
    half = batch.num_tokens // 2
    parts = [
        pooled_embeddings(hidden[:, rank * half : (rank + 1) * half], batch.split(rank, 2), pooling)
        for rank in range(2)
    ]
    torch.testing.assert_close(parts[0] + parts[1], full_vectors)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temperature": 0}, "temperature is 0"),
        ({"texts_per_pass": 0}, "texts_per_pass is 0"),
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


def with_dropout():
    torch.manual_seed(0)
    model = build(Description(**DECODER))
    apply_conversions(model, [LoRA(rank=4, alpha=8, dropout=0.5)])
    for module in model.modules():
        if isinstance(module, LoRALinear):
            torch.nn.init.normal_(module.lora_b.weight)  # zeros would hide the dropout
    return model


def gradients(model):
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_dropout_is_the_same_in_both_passes_of_cached_gradients():
    """With the random numbers of a loop that keeps the graph of every part."""
    batch = collate_embedding(ROWS).to(DEVICE)
    loss = InfoNCELoss(temperature=0.2, texts_per_pass=4)
    model = with_dropout()
    torch.manual_seed(1)
    scores = torch.cat([InfoNCELoss().score_batch(model, part) for part in batch.split_documents(4)])
    total, _ = loss.sum_and_metrics(batch, scores)
    total.backward()
    expected = gradients(model)
    state_after = random_state()

    model.zero_grad()
    torch.manual_seed(1)
    total_in_parts, _ = loss.sum_and_metrics(batch, loss.score_batch(model, batch))
    total_in_parts.backward()
    torch.testing.assert_close(total_in_parts, total)
    torch.testing.assert_close(gradients(model), expected)
    assert torch.equal(random_state(), state_after)


def test_parts_keep_no_graph_until_the_backward_pass():
    """The memory of a batch in parts is that of one part: no tensor of the model is saved for the backward pass."""
    batch = collate_embedding(ROWS).to(DEVICE)
    model = with_dropout()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        InfoNCELoss(texts_per_pass=2).score_batch(model, batch)
    assert not saved


def test_validation_in_parts_equals_one_pass():
    batch = collate_embedding(ROWS).to(DEVICE)
    model = with_dropout().eval()
    with torch.no_grad():
        torch.testing.assert_close(
            InfoNCELoss(texts_per_pass=2).score_batch(model, batch), InfoNCELoss().score_batch(model, batch)
        )


def test_parts_of_models_with_a_balancing_loss_are_refused():
    model = build(Description(**DECODER, num_experts=4, experts_per_token=2, expert_dim=16, router_balance=0.1))
    apply_conversions(model, [BalancingLoss()])
    with pytest.raises(LossError, match="remove BalancingLoss from model_converters"):
        setup_loss(InfoNCELoss(texts_per_pass=2), model)
