"""Log-probs of answers, and rewards and advantages of tokens, against plain formulas."""

import pytest
import torch
from torch import nn

from tests.devices import DEVICE
from torchtune import rlhf
from torchtune.data import collate_preference, padded_collate_dpo
from torchtune.modules import TiedLinear
from torchtune.modules.loss import token_log_probs
from torchtune.modules.output_projection import CappedLinear
from torchtune.modules.peft import LoRALinear

DIM, VOCAB = 6, 13


def projections():
    """Kind -> an output projection with random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        adapted = LoRALinear(DIM, VOCAB, rank=2, alpha=4)
        adapted.initialize_parameters()
        nn.init.normal_(adapted.lora_b.weight)
        projections_by_kind = {
            "plain": nn.Linear(DIM, VOCAB, bias=False),
            "bias": nn.Linear(DIM, VOCAB),
            "capped": CappedLinear(DIM, VOCAB, 2.0),
            "tied": TiedLinear(nn.Embedding(VOCAB, DIM)),
            "tied and capped": TiedLinear(nn.Embedding(VOCAB, DIM), softcap=1.5),
            "adapted": adapted,
        }
    return projections_by_kind


@pytest.mark.parametrize("kind", projections())
@pytest.mark.parametrize("labelled", [True, False])
def test_token_log_probs_are_those_of_all_logits(kind, labelled):
    projection = projections()[kind]
    rng = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 5, DIM, generator=rng).requires_grad_()
    labels = torch.full((2, 5), -100)
    if labelled:
        labels = torch.tensor([[3, -100, 7, 1, -100], [-100, 0, 12, -100, 5]])
    log_probs = token_log_probs(hidden, labels, projection, temperature=0.8)

    # The formula: all logits, of which those of the labels are taken; positions without a label have 0.
    all_log_probs = torch.log_softmax(projection(hidden).float() / 0.8, -1)  # [b, s, v]
    expected = all_log_probs.gather(2, labels.clamp(min=0)[..., None])[..., 0]
    expected = expected.masked_fill(labels == -100, 0.0)
    torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=0)

    if kind == "adapted":
        leaves = [hidden, projection.lora_a.weight, projection.lora_b.weight]
    else:
        leaves = [hidden, getattr(projection, "tied_module", projection).weight]
    scale = torch.linspace(-1, 2, 10).view(2, 5)  # another gradient for each position
    gradients = torch.autograd.grad((log_probs * scale).sum(), leaves)
    expected_gradients = torch.autograd.grad((expected * scale).sum(), leaves)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, atol=1e-5, rtol=0)


def test_labels_of_datasets_are_shifted_already_and_those_of_get_batch_log_probs_are_not():
    rng = torch.Generator().manual_seed(0)
    rows = torch.randint(1, VOCAB, (2, 7), generator=rng)
    is_prompt = torch.tensor([[1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0]], dtype=torch.bool)
    unshifted = rows.masked_fill(is_prompt, -100)
    shifted = torch.cat([unshifted[:, 1:], torch.full((2, 1), -100)], 1)
    example = {
        "chosen_input_ids": rows[0].tolist(),
        "chosen_labels": shifted[0].tolist(),
        "rejected_input_ids": rows[1].tolist(),
        "rejected_labels": shifted[1].tolist(),
    }
    batch = collate_preference([example]).to(DEVICE)
    hidden = torch.randn(1, 14, DIM, generator=rng, dtype=torch.float64)
    head = nn.Linear(DIM, VOCAB, bias=False, dtype=torch.float64)
    log_probs_of_documents = rlhf.document_log_probs(hidden, batch, head)

    # One token after the other: the logits before it have its log-prob. The end of an answer is among the labels.
    logits = head(hidden).view(2, 7, VOCAB)
    for row, start in enumerate((2, 4)):
        log_probs = [torch.log_softmax(logits[row, i - 1], -1)[rows[row, i]] for i in range(start, 7)]
        torch.testing.assert_close(log_probs_of_documents[row], torch.stack(log_probs).sum())

    torch.testing.assert_close(log_probs_of_documents, rlhf.get_batch_log_probs(logits, unshifted))
    _, labels_of_older_recipes = padded_collate_dpo([example])
    assert labels_of_older_recipes.tolist() == unshifted.tolist()
    averaged = rlhf.get_batch_log_probs(logits, unshifted, return_average_logprobs=True)
    torch.testing.assert_close(log_probs_of_documents / torch.tensor([5, 3]), averaged)
    with pytest.raises(ValueError, match="differ"):
        rlhf.get_batch_log_probs(logits, unshifted[:, 1:])


def test_log_probs_in_chunks_equal_those_of_the_whole_batch():
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 6, VOCAB, generator=rng)
    tokens = torch.randint(VOCAB, (5, 2), generator=rng)
    response_logits = rlhf.truncate_sequence_for_logprobs(logits, context_length=4)
    assert torch.equal(response_logits, logits[:, 3:5])
    log_probs = rlhf.batched_logits_to_logprobs(response_logits, tokens, temperature=0.5, chunk_size=2)
    torch.testing.assert_close(log_probs, rlhf.logits_to_logprobs(response_logits, tokens, 0.5))
    expected = torch.log_softmax(logits[2, 3] / 0.5, -1)[tokens[2, 0]]
    torch.testing.assert_close(log_probs[2, 0], expected)


def test_tokens_after_the_first_stop_token_are_replaced():
    rows = torch.tensor([[5, 6, 2, 7, 2], [3, 2, 9, 9, 9], [1, 1, 1, 1, 1], [4, 4, 4, 4, 2]])
    behind, filled = rlhf.truncate_sequence_at_first_stop_token(rows, torch.tensor([2, 3]), fill_value=0)
    assert filled.tolist() == [[5, 6, 2, 0, 0], [3, 0, 0, 0, 0], [1, 1, 1, 1, 1], [4, 4, 4, 4, 2]]
    assert behind.tolist() == [[0, 0, 0, 1, 1], [0, 1, 1, 1, 1], [0] * 5, [0] * 5]


def test_the_last_token_gets_the_score_and_every_token_the_log_ratio():
    log_probs = torch.tensor([[-1.0, -2.0, -3.0]])
    reference = torch.tensor([[-1.5, -2.0, -2.0]])
    scores = torch.tensor([4.0])
    total, ratios, parts = rlhf.get_rewards_ppo(scores, log_probs, reference, 0.1, torch.tensor([1]))
    assert ratios.tolist() == [[0.5, 0.0, -1.0]]
    torch.testing.assert_close(parts, torch.tensor([[-0.05, 0.0, 0.1]]))
    torch.testing.assert_close(total, torch.tensor([[-0.05, 4.0, 0.1]]))
    torch.testing.assert_close(rlhf.get_rewards_ppo(scores, log_probs, reference, 0.1)[0][0, 2], torch.tensor(4.1))
    padding = torch.tensor([[0, 0, 1], [0, 0, 0], [0, 1, 1]], dtype=torch.bool)
    lengths = torch.tensor([2, 3, 1])
    assert rlhf.get_reward_penalty_mask(padding, lengths).tolist() == [False, True, False]
    assert rlhf.get_reward_penalty_mask(padding, lengths, False, 2).tolist() == [False, False, True]


def test_advantages_equal_generalized_advantage_estimates():
    rng = torch.Generator().manual_seed(0)
    values = torch.randn(2, 4, generator=rng, dtype=torch.float64)
    rewards = torch.randn(2, 4, generator=rng, dtype=torch.float64)
    gamma = 0.9
    lmbda = 0.8
    # As the paper writes it, the sum of discounted one-step errors; after the last token, the value is 0.
    next_values = torch.cat([values[:, 1:], torch.zeros(2, 1)], dim=1)
    errors = rewards + gamma * next_values - values
    estimates = torch.zeros(2, 4, dtype=torch.float64)
    for t in range(4):
        for k in range(t, 4):
            estimates[:, t] += (gamma * lmbda) ** (k - t) * errors[:, k]
    partial_mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]], dtype=torch.bool)
    for mask in (None, partial_mask):
        counted = estimates
        if mask is not None:
            counted = estimates[mask]
        whitened = (estimates - counted.mean()) / counted.std()
        for keeps_mean in (True, False):
            advantages, returns = rlhf.estimate_advantages(values, rewards, gamma, lmbda, mask, keeps_mean)
            expected = whitened
            if keeps_mean:
                expected = expected + counted.mean()
            if mask is not None:
                expected = expected.masked_fill(~mask, 0.0)
            torch.testing.assert_close(advantages, expected, atol=1e-6, rtol=0)
            torch.testing.assert_close(returns, estimates + values)


def test_masked_sums_means_and_variances_ignore_masked_values():
    values = torch.tensor([[1.0, 2.0, 50.0], [3.0, -9.0, 8.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]]).bool()
    selected = values[mask]
    torch.testing.assert_close(rlhf.masked_sum(values, mask, dim=1), torch.tensor([3.0, 11.0]))
    torch.testing.assert_close(rlhf.masked_mean(values, mask), selected.mean())
    torch.testing.assert_close(rlhf.masked_var(values - selected.mean(), mask), selected.var())
    torch.testing.assert_close(
        rlhf.masked_var(values - selected.mean(), mask, unbiased=False), selected.var(correction=0)
    )
    centred = rlhf.whiten(values, mask, shift_mean=False)[mask]
    torch.testing.assert_close(centred.mean(), torch.tensor(0.0), atol=1e-5, rtol=0)
    torch.testing.assert_close(rlhf.whiten(values, mask)[mask], centred + selected.mean())
