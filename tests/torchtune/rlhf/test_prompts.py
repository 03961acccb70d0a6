"""Prompts: their lengths, and answers that share them, which are what they are alone: scores, losses, gradients."""

import random

import pytest
import torch
from torch import nn

from tests.devices import DEVICE
from torchtune.data import Batch, BatchLoader, DataError, collate_documents, collate_preference, share_prefixes
from torchtune.models import Description, build
from torchtune.models._mixers import DeltaNetMixer
from torchtune.rlhf import Rollout, SharingError, can_share_prefixes, check_prompts, rollout_batches, share_pairs
from torchtune.rlhf.loss import DPOLoss, GRPOLoss, IPOLoss, RewardLoss, document_log_probs
from torchtune.training import ParallelDims

SIZES = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 16, "intermediate_dim": 16}

KINDS = {
    "plain": {},
    "window and sinks": {"window": 7, "window_layers": (0,), "attn_sinks": True},
    "chunks": {"chunk": 6, "chunk_layers": (0,)},
    "latents": {"num_kv_heads": 4, "head_dim": 6, "rope_dim": 2, "kv_latent_dim": 8, "value_dim": 4},
}


def make(**changes):
    torch.manual_seed(0)
    model = build(Description(**{"vocab_size": 40, "max_seq_len": 256, **SIZES, **changes}))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def pairs():
    """A plain prompt; answers that begin alike; labeled turns in the prompt; nothing in common; one in the other."""
    rng = random.Random(0)
    rows = []
    for prompt_len, num_labelled, chosen, rejected in (
        (30, 0, [1, 2, 3], [4, 5]),
        (12, 0, [6, 7, 8, 9, 10], [6, 7, 8, 11]),
        (20, 4, [1, 2], [3, 3, 3]),
        (2, 0, [5, 6, 7], [8, 9]),
        (140, 0, [12, 13], [12, 13, 14, 15]),
    ):
        prompt = [rng.randrange(40) for _ in range(prompt_len)]
        first_label = prompt_len - num_labelled
        row = {"margin": prompt_len / 100}
        for side, answer in (("chosen", chosen), ("rejected", rejected)):
            tokens = prompt + answer
            row[f"{side}_input_ids"] = tokens[:-1]
            row[f"{side}_labels"] = [-100] * (first_label - 1) + tokens[first_label:]
        rows.append(row)
    return rows


def test_a_shared_prefix_is_in_the_batch_once():
    batch = collate_preference(pairs())
    shared = share_prefixes(batch, batch.per_document["pair"].tolist(), labelled=True)
    # The last token before a difference predicts another one in each answer: it stands in both.
    assert shared.documents.lengths == (29, 3, 2, 14, 2, 1, 19, 2, 3, 4, 3, 140, 1, 3)
    assert shared.documents.prefixes == (-1, 0, 0, -1, 3, 3, -1, 6, 6, -1, -1, -1, 11, 11)
    assert (shared.num_documents, shared.terms) == (batch.num_documents, batch.terms) == (10, 5)
    assert torch.equal(shared.input_pos[0], shared.documents.positions())
    assert shared.documents.max_length == batch.documents.max_length
    assert shared.per_document["is_chosen"].tolist() == [True, False] * 5
    assert share_prefixes(shared, [0] * 10) is shared
    counts = shared.chosen_and_rejected(shared.sum_per_document(shared.labels >= 0))
    assert torch.equal(torch.cat(counts), batch.sum_per_document(batch.labels >= 0))
    # Without labels, what is shared ends before the first of them.
    plain = share_prefixes(batch, batch.per_document["pair"].tolist())
    prefix_lengths = []
    for document, length in enumerate(plain.documents.lengths):
        if document in plain.documents.prefixes:
            prefix_lengths.append(length)
    assert prefix_lengths == [29, 11, 15, 139]
    assert plain.num_labels == batch.num_labels
    alone = collate_documents([{"tokens": [1] * 9, "labels": [2] * 9}] * 2)
    assert share_prefixes(alone, [0, 1]) is alone
    with pytest.raises(DataError, match="neither padded nor split"):
        share_prefixes(batch.pad_to_multiple(100), [0] * 10)


def measure(model, loss, batch, scores, reference):
    """Scores of chosen and of rejected answers, the loss, metrics, and gradients."""
    total, metrics = loss.sum_and_metrics(batch, scores, reference if loss.needs_reference else None)
    model.zero_grad()
    (total / batch.num_terms).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return batch.chosen_and_rejected(scores), total, metrics, gradients


@pytest.mark.parametrize("loss", [DPOLoss(0.5), IPOLoss(0.1), RewardLoss()], ids=lambda loss: type(loss).__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_those_of_answers_alone(loss, kind):
    """The reference runs every answer as a row of its own, without documents."""
    model = make(**KINDS[kind])
    if isinstance(loss, RewardLoss):
        model.output = nn.Linear(16, 1, bias=False)
    rows = pairs()
    reference = torch.linspace(-9, -2, 5).repeat(2)  # of chosen and of rejected answers
    batch = collate_preference(rows)
    shared = share_prefixes(batch, batch.per_document["pair"].tolist(), labelled=True).pad_to_multiple(16)
    batch = batch.to(DEVICE)
    shared = shared.to(DEVICE)

    scores = []
    for side in ("chosen", "rejected"):
        for row in rows:
            answer = {"tokens": row[f"{side}_input_ids"], "labels": row[f"{side}_labels"]}
            single = collate_documents([answer]).to(DEVICE)
            scores.append(loss.score(model(single.tokens, output="hidden"), single, model.output))
    expected_scores, expected_total, expected_metrics, expected_gradients = measure(
        model, loss, batch, torch.cat(scores), reference
    )
    # Pairs are together in the shared batch: chosen and rejected answers take turns.
    scores = loss.score(model(**shared.model_inputs(), output="hidden"), shared, model.output)
    shared_scores, total, metrics, gradients = measure(model, loss, shared, scores, reference.view(2, 5).T.flatten())

    torch.testing.assert_close(shared_scores, expected_scores, atol=2e-5, rtol=1e-6)  # sums of up to 20
    assert total.item() == pytest.approx(expected_total.item(), rel=1e-6)
    for name, (value, count) in expected_metrics.items():
        assert metrics[name][0].item() == pytest.approx(value.item(), rel=1e-5, abs=1e-5), name
        assert metrics[name][1] == count
    scale = max(gradient.abs().max() for gradient in expected_gradients)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, atol=1e-6 * scale.item(), rtol=1e-5)


def test_scores_of_context_parallel_shards_add_up():
    model = make()
    batch = collate_preference(pairs())
    shared = share_prefixes(batch, batch.per_document["pair"].tolist(), labelled=True).pad_to_multiple(2).to(DEVICE)
    hidden = model(**shared.model_inputs(), output="hidden")
    scores = document_log_probs(hidden, shared, model.output)
    parts = []
    for rank, hidden_shard in enumerate(hidden.chunk(2, dim=1)):
        parts.append(document_log_probs(hidden_shard, shared.split(rank, 2), model.output))
    torch.testing.assert_close(sum(parts), scores, atol=1e-5, rtol=0)


def test_models_without_support_for_prefixes_share_none():
    mixer = DeltaNetMixer(num_key_heads=2, num_value_heads=4, key_dim=6, value_dim=5)
    assert can_share_prefixes(make())
    assert not can_share_prefixes(make(), False)
    beside_attention = make()
    beside_attention.layers[1].mixer = make(mixer=mixer, mixer_layers=(0,)).layers[0].attn
    replaced = make()
    replaced.layers[1].attn.attention = lambda *tensors, **_: tensors[0]
    for model, reason in (
        (make(mixer=mixer, mixer_layers=(0,)), "layer 0 has GatedDeltaNet, which goes on from no other document"),
        (beside_attention, "layer 1 has GatedDeltaNet"),
        (make(attn_dropout=0.1), "attn_dropout"),
        (replaced, "layer 1 computes attention with a function of its own"),
        (nn.Linear(2, 2), "is not a TransformerDecoder"),
    ):
        assert not can_share_prefixes(model)
        with pytest.raises(SharingError, match=f"^share_prefix: .*{reason}.*: set it to null"):
            can_share_prefixes(model, True)
    answers_alike = [{"tokens": [*range(9), end], "labels": [1] * 10} for end in (1, 2)]
    shared = share_prefixes(collate_documents(answers_alike), [0] * 2, labelled=True)
    with pytest.raises(ValueError, match="Documents share a prefix, but layer 1"):
        replaced(**Batch.model_inputs(shared.to(DEVICE)))


class TokenLoss(DPOLoss):
    """Of a user, who adds up tokens."""

    def score(self, hidden, batch, projection):
        """Of every token."""
        return hidden


def test_labels_are_shared_for_losses_of_answers_alone():
    # All answers have 38; what is shared has 3 in the second pair, 4 in the third and 1 in the last.
    for loss, labels in ((DPOLoss, 30), (RewardLoss, 30), (TokenLoss, 38)):
        loader = BatchLoader(pairs(), batch_size=5, collate_fn=collate_preference, shuffle=False, seed=0)
        assert share_pairs(loader, make(), loss(), ParallelDims()).peek()[0].num_labels == labels


def test_batches_of_single_answers_share_no_prefix():
    rows = [{"tokens": [*range(9), end], "labels": [1] * 10, "is_chosen": end > 1} for end in (1, 2)]
    loader = BatchLoader(rows, batch_size=2, collate_fn=collate_preference, shuffle=False, seed=0)
    possibly_shared = share_pairs(loader, make(), DPOLoss(), ParallelDims())
    assert possibly_shared.peek()[0].documents.lengths == (10, 10)
    required = share_pairs(loader, make(), DPOLoss(), ParallelDims(), share_prefix=True)
    with pytest.raises(DataError, match=r"^share_prefix: the batches have no pairs .*: set it to null"):
        required.peek()


def answers():
    """Two groups: answers of several lengths, two that begin alike with the same advantage, one of a single token."""
    rng = random.Random(1)
    rollouts = []
    for prompt_len, group in ((40, [[1, 2, 3], [1, 2, 4, 5], [6], [7, 8]]), (9, [[3, 3], [2, 1, 1]])):
        prompt = [rng.randrange(40) for _ in range(prompt_len)]
        for answer in group:
            sampled = torch.tensor([-2.0 - rng.random() for _ in answer], device="cpu")
            rollouts.append(Rollout(torch.tensor(prompt + answer, device="cpu"), prompt_len, sampled, True))
    rollouts[1].log_probs[:2] = rollouts[0].log_probs[:2]
    return rollouts, [0.5, 0.5, -1.0, 0.25, 1.0, -1.0]


@pytest.mark.parametrize(
    "loss", [GRPOLoss(kl_coeff=0.1), GRPOLoss(ratio="sequence", normalize="sequences")], ids=["k3", "sequences"]
)
def test_gradients_of_a_shared_prompt_equal_those_of_separate_answers(loss):
    model = make()
    rollouts, advantages = answers()
    options = {"dims": ParallelDims(), "blank": [1], "count_documents": loss.normalize != "tokens"}
    runs = []
    for share, limit in ((False, 1), (True, 64)):
        batches, terms, labels = rollout_batches(
            rollouts, advantages, tokens_per_batch=limit, share_prefix=share, **options
        )
        model.zero_grad()
        total = 0.0
        for host_batch in batches:
            batch = host_batch.to(DEVICE)
            scores = loss.score(model(**batch.model_inputs(), output="hidden"), batch, model.output)
            reference = 1.1 * scores.detach() if loss.needs_reference else None
            value = loss.sum_and_metrics(batch, scores, reference)[0] / terms
            value.backward()
            total += value.item()
        runs.append((batches, (total, terms, labels), [parameter.grad for parameter in model.parameters()]))
    (alone, expected_sums, expected_gradients), (together, sums, gradients) = runs
    # The room for tokens is that of computed ones.
    assert (len(alone), len(together)) == (6, 1)
    assert together[0].documents.lengths == (39, 3, 4, 1, 2, 8, 2, 3)
    assert sums == pytest.approx(expected_sums, rel=1e-6, abs=1e-7)  # the loss is near zero
    scale = max(gradient.abs().max() for gradient in expected_gradients).item()
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, atol=1e-6 * scale, rtol=1e-5)


def test_prompts_of_unknown_lengths_are_not_checked():
    check_prompts([{"tokens": [1, 2], "labels": [2, -100]}], sampler=None, model=None)
