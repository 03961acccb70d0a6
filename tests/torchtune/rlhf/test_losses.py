"""Losses of preferences equal their formulas in plain floats, and so do their gradients."""

import math
from collections.abc import Callable

import pytest
import torch

from tests.devices import DEVICE
from torchtune import config
from torchtune.data import DataError, collate_preference, share_prefixes
from torchtune.modules.loss import LossError
from torchtune.rlhf import ChosenRejectedOutputs
from torchtune.rlhf.loss import (
    APODownLoss,
    APOZeroLoss,
    BCOPairLoss,
    ChosenNLLLoss,
    CPOLoss,
    DPOLoss,
    HingeLoss,
    IPOLoss,
    KTOLoss,
    MixedPreferenceLoss,
    ORPOLoss,
    PPOLoss,
    PreferenceLoss,
    RewardLoss,
    RobustDPOLoss,
    RSOLoss,
    SigmoidNormLoss,
    SimPOLoss,
    pooled_scores,
)

# Sums of log-probs of three pairs, policy and reference, and labeled tokens of their answers.
POLICY = ((-12.0, -3.5, -30.25), (-15.5, -2.25, -11.0))
REFERENCE = ((-12.5, -3.0, -29.0), (-13.0, -4.0, -11.5))
LENGTHS = ((7, 2, 15), (9, 3, 6))


def nls(x):
    """−log σ(x)"""
    return math.log1p(math.exp(-x))


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def odds(p):
    return math.log(math.exp(p) / (1.0 - math.exp(p)))


# Loss -> its formula for one pair, as in its paper, with the summed log-probs of the chosen and the rejected answer by
# the policy (c, r) and by the reference (C, R), and the number of tokens of the answers (n, k).
FORMULAS: dict[str, tuple[PreferenceLoss, Callable[..., float]]] = {
    "dpo": (DPOLoss(0.3), lambda c, r, C, R, n, k: nls(0.3 * (c - r - C + R))),
    "cdpo": (
        DPOLoss(0.3, 0.2),
        lambda c, r, C, R, n, k: 0.8 * nls(0.3 * (c - r - C + R)) + 0.2 * nls(-0.3 * (c - r - C + R)),
    ),
    "robust": (
        RobustDPOLoss(0.3, 0.2),
        lambda c, r, C, R, n, k: (0.8 * nls(0.3 * (c - r - C + R)) - 0.2 * nls(-0.3 * (c - r - C + R))) / 0.6,
    ),
    "hinge": (HingeLoss(0.2), lambda c, r, C, R, n, k: max(0.0, 1 - 0.2 * (c - r - C + R))),
    "ipo": (IPOLoss(0.4), lambda c, r, C, R, n, k: ((c - C) / n - (r - R) / k - 1 / 0.8) ** 2),
    "sigmoid-norm": (SigmoidNormLoss(2.0), lambda c, r, C, R, n, k: nls(2.0 * ((c - C) / n - (r - R) / k))),
    "simpo": (SimPOLoss(2.5, 0.7), lambda c, r, C, R, n, k: nls(2.5 * (c / n - r / k) - 0.7)),
    "orpo": (ORPOLoss(0.3), lambda c, r, C, R, n, k: -c / n + 0.3 * nls(odds(c / n) - odds(r / k))),
    "cpo": (CPOLoss(0.3, 0.5), lambda c, r, C, R, n, k: nls(0.3 * (c - r)) - 0.5 * c / n),
    "rpo": (DPOLoss(0.3, rpo_alpha=0.7), lambda c, r, C, R, n, k: nls(0.3 * (c - r - C + R)) - 0.7 * c / n),
    "apo-zero": (APOZeroLoss(0.3), lambda c, r, C, R, n, k: 1 - sigmoid(0.3 * (c - C)) + sigmoid(0.3 * (r - R))),
    "apo-down": (
        APODownLoss(0.3),
        lambda c, r, C, R, n, k: sigmoid(0.3 * (c - C)) + 1 - sigmoid(0.3 * (c - C - r + R)),
    ),
    "bco-pair": (BCOPairLoss(0.3), lambda c, r, C, R, n, k: nls(0.3 * (c - C)) + nls(0.3 * (R - r))),
    "nll": (ChosenNLLLoss(), lambda c, r, C, R, n, k: -c / n),
    "mpo": (
        MixedPreferenceLoss([DPOLoss(0.3), BCOPairLoss(0.2), ChosenNLLLoss()], [0.8, 0.2, 1.5]),
        lambda c, r, C, R, n, k: (
            0.8 * nls(0.3 * (c - r - C + R)) + 0.2 * (nls(0.2 * (c - C)) + nls(0.2 * (R - r))) - 1.5 * c / n
        ),
    ),
    "simpo-nll": (
        MixedPreferenceLoss([SimPOLoss(2.5, 0.7), ChosenNLLLoss()]),
        lambda c, r, C, R, n, k: nls(2.5 * (c / n - r / k) - 0.7) - c / n,
    ),
    "reward": (RewardLoss(0.02), lambda c, r, C, R, n, k: nls(c - r) + 0.02 * (c + r) ** 2),
}


def outputs(sums):
    """Log-probs ``(chosen, rejected)`` of the three pairs, which are differentiable, with their lengths."""
    chosen, rejected = sums
    return ChosenRejectedOutputs(
        torch.tensor(chosen, dtype=torch.float64, requires_grad=True),
        torch.tensor(rejected, dtype=torch.float64, requires_grad=True),
        chosen_lengths=torch.tensor(LENGTHS[0]),
        rejected_lengths=torch.tensor(LENGTHS[1]),
    )


def slope(formula, values, at):
    """Derivative by the argument ``at``, as a central difference."""
    step = 1e-5
    high = list(values)
    high[at] += step
    low = list(values)
    low[at] -= step
    return (formula(*high) - formula(*low)) / (2 * step)


@pytest.mark.parametrize("name", FORMULAS)
def test_preference_loss_and_gradient_equal_the_formula(name):
    loss, formula = FORMULAS[name]
    policy = outputs(POLICY)
    reference = outputs(REFERENCE)
    if loss.is_reference_free:
        reference = None
    losses, *rewards = loss(policy, reference)
    losses.sum().backward()
    gradient_of_chosen = policy.chosen_logps.grad
    gradient_of_rejected = policy.rejected_logps.grad
    if gradient_of_rejected is None:  # the loss does not use it
        gradient_of_rejected = torch.zeros(3)
    for i, numbers in enumerate(zip(*POLICY, *REFERENCE, *LENGTHS, strict=True)):
        assert losses[i].item() == pytest.approx(formula(*numbers), abs=1e-9)
        # A central difference of a step of 1e-5 has about ten digits.
        assert gradient_of_chosen[i].item() == pytest.approx(slope(formula, numbers, 0), abs=1e-6)
        assert gradient_of_rejected[i].item() == pytest.approx(slope(formula, numbers, 1), abs=1e-6)
    if name == "dpo":
        expected_rewards = 0.3 * (torch.tensor(POLICY) - torch.tensor(REFERENCE))
        torch.testing.assert_close(torch.stack(rewards).float(), expected_rewards)
    assert not any(reward.requires_grad for reward in rewards)


def test_preference_losses_take_tensors_or_outputs():
    policy = outputs(POLICY)
    reference = outputs(REFERENCE)
    tensors = (policy.chosen_logps, policy.rejected_logps, reference.chosen_logps, reference.rejected_logps)
    assert torch.equal(DPOLoss()(*tensors)[0], DPOLoss()(policy, reference)[0])
    means = SimPOLoss()(policy.chosen_mean, policy.rejected_mean)[0]
    assert torch.equal(means, SimPOLoss()(policy)[0])
    assert SimPOLoss().is_reference_free
    assert not DPOLoss().is_reference_free
    with pytest.warns(FutureWarning, match="HingeLoss"):
        hinge = RSOLoss(gamma=0.2)
    assert torch.equal(hinge(*tensors)[0], HingeLoss(0.2)(policy, reference)[0])
    for arguments in ((policy,), tensors[:2], tensors[:3], (policy, reference, policy)):
        with pytest.raises(TypeError, match="DPOLoss takes"):
            DPOLoss()(*arguments)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DPOLoss(beta=0.0), "beta is 0.0"),
        (lambda: DPOLoss(label_smoothing=0.5), "label_smoothing is 0.5"),
        (lambda: KTOLoss(beta=-1.0), "beta is -1.0"),
        (lambda: KTOLoss(desirable_weight=0, undesirable_weight=0), "one must be above"),
        (lambda: SimPOLoss(beta=0), "beta is 0"),
        (lambda: CPOLoss(beta=-0.1), "beta is -0.1"),
        (lambda: PPOLoss(epsilon=-0.1), "epsilon is -0.1"),
        (lambda: DPOLoss(rpo_alpha=-1.0), "rpo_alpha is -1.0"),
        (lambda: MixedPreferenceLoss([]), "losses is empty"),
        (lambda: MixedPreferenceLoss([DPOLoss(), BCOPairLoss()], [1.0]), "1 weights for 2 losses"),
        (lambda: MixedPreferenceLoss([DPOLoss(), BCOPairLoss()], [1.0, -1.0]), "loss_weights is -1.0"),
        (lambda: MixedPreferenceLoss([DPOLoss()], [0.0]), "loss_weights are all 0"),
        (lambda: MixedPreferenceLoss([DPOLoss(), RewardLoss()]), "losses has a RewardLoss"),
        (lambda: MixedPreferenceLoss([DPOLoss(), KTOLoss()]), "losses has a KTOLoss"),
    ],
)
def test_coefficients_out_of_range_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def pair(num_chosen, num_rejected, labels=True, **numbers):
    """A pair of answers of so many tokens after a prompt of two; labels are shifted."""
    example = dict(numbers)
    for side, count in (("chosen", num_chosen), ("rejected", num_rejected)):
        tokens = list(range(1, 3 + count))
        answer_labels = [-100] * count
        if labels:
            answer_labels = tokens[2:]
        example[f"{side}_input_ids"] = tokens
        example[f"{side}_labels"] = [-100, *answer_labels, -100]
    return example


def test_a_pair_without_labels_adds_nothing():
    """A rank that has no example computes such a pair; so accumulation and ranks change nothing."""
    batch = collate_preference([pair(3, 2), pair(1, 4)]).to(DEVICE)
    filled = collate_preference([pair(3, 2), pair(1, 4), pair(2, 2, labels=False)]).to(DEVICE)
    assert (batch.num_terms, filled.num_terms) == (2, 2)
    scores = torch.tensor([-1.0, -2.0, -3.0, -2.5], requires_grad=True)
    filled_scores = torch.tensor([-1.0, -2.0, 0.0, -3.0, -2.5, 0.0], requires_grad=True)
    mixed = MixedPreferenceLoss([DPOLoss(), BCOPairLoss(), ChosenNLLLoss()])
    for loss in (DPOLoss(rpo_alpha=0.5), SimPOLoss(), ORPOLoss(), CPOLoss(), APODownLoss(), mixed, RewardLoss()):
        reference = None
        filled_reference = None
        if not loss.is_reference_free:
            reference = torch.zeros(4)
            filled_reference = torch.zeros(6)
        total, metrics = loss.sum_and_metrics(batch, scores, reference)
        filled_total, filled_metrics = loss.sum_and_metrics(filled, filled_scores, filled_reference)
        torch.testing.assert_close(total, filled_total)
        torch.testing.assert_close(metrics, filled_metrics)
        (gradient,) = torch.autograd.grad(filled_total, filled_scores)
        assert gradient[[2, 5]].tolist() == [0.0, 0.0]
    assert float(metrics["rewards/accuracies"][0]) == 2.0


def test_weighted_sum_equals_the_formula_and_metrics_count_every_pair_once():
    """Also if answers stand behind the prompt that they share, which changes their order."""
    weights = (0.25, 3.0, 1.0)
    examples = [pair(9, 12, weight=0.25), pair(2, 3, weight=3), pair(8, 1)]
    answers = collate_preference(examples)
    shared = share_prefixes(answers, answers.per_document["pair"].tolist(), labelled=True)
    assert shared.documents.num_prefixes
    for batch in (answers.to(DEVICE), shared.to(DEVICE)):
        assert batch.num_terms == sum(weights)
        # Index of each document's answer in the three chosen and the three rejected ones.
        order = batch.per_document["pair"] + torch.where(batch.per_document["is_chosen"], 0, 3)
        scores = torch.tensor([*POLICY[0], *POLICY[1]], dtype=torch.float64)[order].requires_grad_()
        reference = torch.tensor([*REFERENCE[0], *REFERENCE[1]], dtype=torch.float64)[order]
        for name, (loss, formula) in FORMULAS.items():
            total, metrics = loss.sum_and_metrics(batch, scores, None if loss.is_reference_free else reference)
            expected = 0.0
            pairs = zip(*POLICY, *REFERENCE, (9, 2, 8), (12, 3, 1), strict=True)
            for weight, numbers in zip(weights, pairs, strict=True):
                expected += weight * formula(*numbers)
            assert total.item() == pytest.approx(expected, abs=1e-6), name  # weights are float32
            assert metrics["rewards/accuracies"][1] == 3
    with torch.no_grad():
        total, _ = RewardLoss(0.0).sum_and_metrics(answers.to(DEVICE), torch.zeros(6))
    assert total.item() == pytest.approx(sum(weights) * math.log(2), abs=1e-6)


def test_reward_loss_subtracts_the_margin_of_an_example():
    batch = collate_preference([pair(1, 2, margin=0.5), pair(2, 1, margin=2.0)]).to(DEVICE)
    scores = torch.tensor([1.0, 2.0, 0.25, -1.0], dtype=torch.float64)
    total, _ = RewardLoss(0.0).sum_and_metrics(batch, scores)
    assert total.item() == pytest.approx(nls(1.0 - 0.25 - 0.5) + nls(2.0 + 1.0 - 2.0), abs=1e-9)


def answer(prompt, completion, good):
    """A labeled answer; labels are shifted."""
    labels = [-100] * (len(prompt) - 1) + completion + [-100]
    return {"tokens": prompt + completion, "labels": labels, "is_chosen": good}


ANSWERS = [answer([1, 2, 3], [11, 12], True), answer([4], [13, 14, 15], False), answer([5, 6], [16], True)]


def test_kto_equals_its_formula():
    batch = collate_preference(ANSWERS).to(DEVICE)
    policy = torch.tensor([-4.0, -2.0, -1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-5.0, -2.5, -0.5], dtype=torch.float64)
    ratios = (1.0, 0.5, -0.5)  # policy - reference
    signs = (1, -1, 1)  # good, bad, good
    weights = (1.5, 0.5, 1.5)
    for baseline in (0.25, -0.25):
        clipped = max(0.0, baseline)

        def formula(ratio, sign, weight, baseline=clipped):
            return weight * (1 - sigmoid(sign * 0.3 * (ratio - baseline)))

        total, metrics = KTOLoss(0.3, 1.5, 0.5).sum_and_metrics(
            batch, policy, reference, torch.tensor(baseline, dtype=torch.float64)
        )
        assert total.item() == pytest.approx(sum(map(formula, ratios, signs, weights)), abs=1e-9)
        (gradient,) = torch.autograd.grad(total, policy)
        for i, numbers in enumerate(zip(ratios, signs, weights, strict=True)):
            assert gradient[i].item() == pytest.approx(slope(formula, numbers, 0), abs=1e-6)
    assert float(metrics["rewards/chosen"][0] / metrics["rewards/chosen"][1]) == pytest.approx(0.3 * 0.25)
    assert float(metrics["rewards/rejected"][0]) == pytest.approx(0.3 * 0.5)


def test_weighted_sum_of_kto_equals_its_formula():
    weights = (0.5, 3.0, 1.0)
    batch = collate_preference([{**row, "weight": weight} for row, weight in zip(ANSWERS, weights, strict=True)])
    assert batch.num_terms == 4.5
    policy = torch.tensor([-4.0, -2.0, -1.0], dtype=torch.float64)
    reference = torch.tensor([-5.0, -2.5, -0.5], dtype=torch.float64)
    total, metrics = KTOLoss(0.3).sum_and_metrics(batch.to(DEVICE), policy, reference, torch.tensor(0.25))
    good = sigmoid(-0.3 * (1.0 - 0.25))
    bad = sigmoid(0.3 * (0.5 - 0.25))
    worse_than_the_reference = sigmoid(-0.3 * (-0.5 - 0.25))
    expected = weights[0] * good + weights[1] * bad + weights[2] * worse_than_the_reference
    assert total.item() == pytest.approx(expected, abs=1e-6)
    assert metrics["rewards/chosen"][1] == 2


def test_kto_mismatches_prompts_with_the_next_answer():
    mismatched = KTOLoss().mismatched_batch(collate_preference(ANSWERS))
    assert mismatched.documents.lengths == (5, 2, 4)
    tokens = mismatched.tokens[0].split([5, 2, 4])
    labels = mismatched.labels[0].split([5, 2, 4])
    assert tokens[0].tolist() == [1, 2, 3, 13, 14]  # no longer than the longest document, five tokens
    assert labels[0].tolist() == [-100, -100, 13, 14, -100]
    assert tokens[1].tolist() == [4, 16]
    assert labels[1].tolist() == [16, -100]
    assert tokens[2].tolist() == [5, 6, 11, 12]
    assert labels[2].tolist() == [-100, 11, 12, -100]
    assert mismatched.input_pos.tolist() == [[0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3]]


def test_kto_reads_no_value_of_an_accelerator():
    batch = collate_preference(ANSWERS).to("meta")  # whose values cannot be read
    mismatched = KTOLoss().mismatched_batch(batch)
    assert mismatched.documents.lengths == (5, 2, 4)
    devices = {mismatched.tokens.device.type, mismatched.labels.device.type, mismatched.input_pos.device.type}
    assert devices == {"meta"}
    batch.labels = batch.labels.clone()
    assert batch.on_host is batch, "the labels on the host are others"


def test_kto_refuses_pairs_and_batches_of_one_example():
    with pytest.raises(DataError, match="batch_size to 2 or more"):
        KTOLoss().mismatched_batch(collate_preference(ANSWERS[:1]))
    with pytest.raises(DataError, match="kto_dataset"):
        KTOLoss().mismatched_batch(collate_preference([pair(1, 1)]))
    with pytest.raises(DataError, match="collate_preference"):
        DPOLoss().sum_and_metrics(collate_preference(ANSWERS), torch.zeros(3), torch.zeros(3))


def test_scores_are_pooled_at_the_last_token_of_a_document_not_at_padding():
    batch = collate_preference([pair(3, 2), pair(1, 4)]).to(DEVICE)
    head = torch.nn.Linear(3, 1, bias=False, dtype=torch.float64)
    ends = torch.tensor(batch.documents.lengths).cumsum(0) - 1
    expected = ends.double() * head.weight.sum()

    def positions(batch):
        """Hidden states [1, s, 3] that hold their position, so that a score tells where it was pooled."""
        return torch.arange(batch.num_tokens, dtype=torch.float64)[None, :, None].expand(-1, -1, 3)

    torch.testing.assert_close(pooled_scores(positions(batch), batch, head), expected)
    padded = batch.pad_to_multiple(8)
    torch.testing.assert_close(pooled_scores(positions(padded), padded, head), expected)

    # Of a sequence that two ranks share, each pools the ends that it has.
    halves = [padded.split(rank, 2) for rank in (0, 1)]
    first_hidden, second_hidden = positions(padded).chunk(2, 1)
    first_scores = pooled_scores(first_hidden, halves[0], head)
    second_scores = pooled_scores(second_hidden, halves[1], head)
    torch.testing.assert_close(first_scores + second_scores, expected)
    assert [half.num_terms for half in halves] == [2, 0]


def test_ppo_equals_its_formula():
    rng = torch.Generator().manual_seed(0)
    # Old and new log-probs, advantages, old and new values, returns: [2 answers, 4 tokens].
    tensors = [torch.randn(2, 4, generator=rng, dtype=torch.float64) * 0.5 for _ in range(6)]
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]], dtype=torch.bool)
    losses_and_metrics = PPOLoss(0.2, 0.1, 0.3)(*tensors, mask, mask)

    def clip(x, low, high):
        return min(max(x, low), high)

    policy_terms = []
    value_terms = []
    ratios = []
    num_clipped = 0
    tokens = [tensor[mask].tolist() for tensor in tensors]
    for old, new, advantage, old_value, value, returned in zip(*tokens, strict=True):
        ratio = math.exp(new - old)
        unclipped = -advantage * ratio
        clipped = -advantage * clip(ratio, 0.8, 1.2)
        near_value = clip(value, old_value - 0.1, old_value + 0.1)
        ratios.append(ratio)
        num_clipped += clipped > unclipped
        policy_terms.append(max(unclipped, clipped))
        value_terms.append(max((value - returned) ** 2, (near_value - returned) ** 2))
    policy_loss = sum(policy_terms) / 5
    value_loss = 0.5 * sum(value_terms) / 5
    expected = [policy_loss + 0.3 * value_loss, policy_loss, value_loss, sum(ratios) / 5, num_clipped / 5]
    assert [value.item() for value in losses_and_metrics] == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("pairs", [2, 3])
def test_a_loss_that_returns_no_rewards_is_refused(pairs):
    """Three losses could be taken for the losses and the rewards of one pair."""

    class Margin(DPOLoss):
        needs_reference = False

        def compare(self, policy, reference):
            """Return the losses, and no rewards."""
            return torch.relu(1 - policy.chosen_logps + policy.rejected_logps)

    with pytest.raises(LossError, match=r"Margin.compare must return three tensors of one number for each pair"):
        Margin()(torch.zeros(pairs), torch.zeros(pairs))


def test_mixed_loss_is_read_from_a_config_and_logs_the_rewards_of_its_first_loss():
    loss = config.instantiate(
        {
            "_component_": "torchtune.rlhf.loss.MixedPreferenceLoss",
            "losses": [
                {"_component_": "torchtune.rlhf.loss.DPOLoss", "beta": 0.3},
                {"_component_": "torchtune.rlhf.loss.ChosenNLLLoss"},
            ],
            "loss_weights": [1.0, 0.5],
        }
    )
    policy = outputs(POLICY)
    reference = outputs(REFERENCE)
    losses, *rewards = loss(policy, reference)
    torch.testing.assert_close(losses, DPOLoss(0.3, rpo_alpha=0.5)(policy, reference)[0])
    torch.testing.assert_close(rewards, list(DPOLoss(0.3)(policy, reference)[1:]))
    assert not MixedPreferenceLoss([SimPOLoss(), ChosenNLLLoss()]).needs_reference


def test_likelihood_of_log_probs_without_lengths_is_refused():
    sums = [torch.zeros(2) for _ in range(4)]
    with pytest.raises(ValueError, match="rpo_alpha averages the chosen answer's log-prob: give chosen_lengths"):
        DPOLoss(rpo_alpha=1.0)(*sums)
