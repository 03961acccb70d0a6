"""Losses, advantages and rollouts of GRPO, against plain formulas in float64."""

import itertools
import math
import statistics
from dataclasses import dataclass, replace
from itertools import compress

import pytest
import torch
from torch import Tensor

import torchtune
from tests.devices import DEVICE
from tests.tiny import write_checkpoint
from torchtune import rlhf
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX
from torchtune.modules.peft import LoRA
from torchtune.rlhf import (
    GroupAdvantages,
    LocalSampler,
    RewardSum,
    Rollout,
    RolloutError,
    _scored_rollouts,
    collate_rollouts,
)
from torchtune.rlhf import reward_functions as rewards
from torchtune.rlhf.loss import (
    CISPOLoss,
    DAPOLoss,
    DrGRPOLoss,
    GRPOLoss,
    GSPOLoss,
    OnPolicyDistillationLoss,
    RLOOLoss,
    setup_loss,
)
from torchtune.training import ParallelDims

LENGTHS = [3, 1, 5, 4]


def numbers(count, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(count, generator=generator, dtype=torch.float64)


def by_hand(loss, now, old, values, ref, sampled):
    """The mean over the step, sequence by sequence and token by token, with weights without gradient spelled out."""
    total = torch.zeros((), dtype=torch.float64)
    start = 0
    good_lengths = list(compress(LENGTHS, [value > 0 for value in values]))
    for length, value in zip(LENGTHS, values, strict=True):
        span = slice(start, start + length)
        sequence_total = torch.zeros((), dtype=torch.float64)
        for t in range(span.start, span.stop):
            sequence_ratio = torch.exp((now[span] - old[span]).sum() / length)
            rho = sequence_ratio if loss.ratio == "sequence" else torch.exp(now[t] - old[t])
            advantage = value if loss.needs_rewards else 0.0
            if loss.kl_coeff and loss.kl == "k1":
                advantage -= loss.kl_coeff * float(old[t] - ref[t])
            if loss.kind == "cispo":
                term = -min(rho.item(), 1 + loss.epsilon_high) * advantage * now[t]
            else:
                bound = min(max(rho.item(), 1 - loss.epsilon), 1 + loss.epsilon_high)
                bound = rho if bound == rho.item() else torch.tensor(bound, dtype=torch.float64)
                term = -min(rho * advantage, bound * advantage, key=Tensor.item)
            term = loss.rl_coeff * term
            if loss.kl_coeff and loss.kl == "k3":
                x = torch.exp(ref[t] - now[t])
                term = term + loss.kl_coeff * torch.exp(now[t] - old[t]) * (x - torch.log(x) - 1)
            if loss.importance_cap is not None:
                term = term * min(math.exp(old[t] - sampled[t]), loss.importance_cap)
            sequence_total = sequence_total + term
        if loss.normalize == "tokens":
            divisor = sum(LENGTHS)
        elif loss.normalize == "sequences":
            divisor = length * len(LENGTHS)
        else:
            divisor = loss.constant * len(LENGTHS)
        total = total + sequence_total / divisor
        if value > 0:  # the mean over the tokens of good answers
            total = total - loss.ce_coeff * now[span].sum() / sum(good_lengths)
        start += length
    return total


@pytest.mark.parametrize(
    "loss",
    [
        GRPOLoss(),
        GRPOLoss(0.1, 0.1, normalize="sequences", kl_coeff=0.3),
        GRPOLoss(kl_coeff=0.2, kl="k1", importance_cap=1.1),
        DAPOLoss(),
        DrGRPOLoss(constant=8.0),
        GSPOLoss(0.01, 0.02),
        CISPOLoss(0.1),
        RLOOLoss(),
        OnPolicyDistillationLoss(),
        GRPOLoss(normalize="sequences", rl_coeff=0.5, ce_coeff=0.2, kl_coeff=0.1),
        GRPOLoss(rl_coeff=0.0, ce_coeff=1.0),
    ],
    ids=lambda loss: type(loss).__name__,
)
def test_losses_and_gradients_follow_the_formula(loss):
    count = sum(LENGTHS)
    values = [1.0, -0.5, -2.0, 0.3]
    old = numbers(count, 1.0, 0) - 3.0
    ref = old + numbers(count, 0.3, 2)
    sampled = old + numbers(count, 0.2, 3)
    now = (old + numbers(count, 0.3, 1)).requires_grad_()
    sequences = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    advantages = torch.tensor(values, dtype=torch.float64)[sequences]
    reference = ref if loss.needs_reference else None
    terms = loss.num_terms(count, len(LENGTHS))
    weights = None
    if loss.ce_coeff:
        is_good = advantages > 0
        weights = {"ce": is_good.double() * (terms / int(is_good.sum()))}
    losses, figures = loss(now, old, advantages, sequences, reference, sampled, weights)
    mean = losses.sum() / terms
    expected = by_hand(loss, now, old, values, ref, sampled)
    torch.testing.assert_close(mean, expected, atol=1e-9, rtol=0)
    (gradient,) = torch.autograd.grad(mean, now)
    (expected_gradient,) = torch.autograd.grad(expected, now)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-9, rtol=0)
    assert gradient.abs().max() > 1e-3
    assert ("kl" in figures) == loss.needs_reference
    if loss.kind == "ppo" and loss.kl_coeff == 0:
        assert 0 < figures["clipped"].mean() < 1


def test_advantages_follow_the_formula():
    groups = [[1.0, 0.0, 0.5, 0.0], [1.0, 1.0, 1.0, 1.0], [2.0, math.nan, -1.0, 0.0]]
    rewards_of_groups = torch.tensor(groups, dtype=torch.float64)
    scored = []  # rewards of every group, without those of dropped answers
    for group in groups:
        scored.append([reward for reward in group if not math.isnan(reward)])
    deviation_of_batch = statistics.stdev(itertools.chain.from_iterable(scored))
    plain = GroupAdvantages()(rewards_of_groups)
    leave_one_out = GroupAdvantages(leave_one_out=True)(rewards_of_groups)
    scaled_by_group = GroupAdvantages(scale="group")(rewards_of_groups)
    scaled_by_batch = GroupAdvantages(scale="batch")(rewards_of_groups)
    for i, group in enumerate(groups):
        for j, reward in enumerate(group):
            if math.isnan(reward):
                for advantages in (plain, leave_one_out, scaled_by_group, scaled_by_batch):
                    assert math.isnan(advantages[i, j])
                continue
            centered = reward - statistics.mean(scored[i])
            other_rewards = scored[i].copy()
            other_rewards.remove(reward)
            deviation_of_group = statistics.stdev(scored[i])
            assert plain[i, j].item() == pytest.approx(centered, abs=1e-12)
            assert leave_one_out[i, j].item() == pytest.approx(reward - statistics.mean(other_rewards), abs=1e-12)
            assert scaled_by_group[i, j].item() == pytest.approx(centered / (deviation_of_group + 1e-4), abs=1e-12)
            assert scaled_by_batch[i, j].item() == pytest.approx(centered / (deviation_of_batch + 1e-4), abs=1e-12)
    assert rlhf.has_variance(rewards_of_groups).tolist() == [True, False, True]
    assert abs(plain.nansum(1)).max() < 1e-12, "centered: the mean is not added back"


def test_an_advantages_component_is_called_once_before_the_run():
    class OneForAll:
        def __call__(self, rewards, dims):
            return rewards.mean()

    class WithoutDims:
        def __call__(self, rewards):
            return rewards

    component = GroupAdvantages(leave_one_out=True)
    assert rlhf.make_advantages(component) is component
    assert isinstance(rlhf.make_advantages(None), GroupAdvantages)
    with pytest.raises(RolloutError, match="OneForAll returns no advantage for each reward"):
        rlhf.make_advantages(OneForAll())
    with pytest.raises(RolloutError, match="WithoutDims fails: TypeError"):
        rlhf.make_advantages(WithoutDims())


def test_a_resumed_run_truncates_the_records_of_all_ranks(tmp_path):
    """Steps that are done again on one process are taken out of the files of all."""
    files = [tmp_path / f"rollouts{rank}.jsonl" for rank in ("", "_rank1")]
    for path in files:
        path.write_text("".join(f'{{"step": {step}}}\n' for step in (1, 2, 3)))
    record = rlhf.RolloutRecord(str(tmp_path), None, ParallelDims())
    nothing = rlhf.ScoredRollouts([], [], [], torch.zeros(0, 2), {})
    record.write(3, nothing, torch.zeros(0, 2), 1)
    assert [path.read_text().count("step") for path in files] == [2, 2]
    files[0].write_text('{"step": 1}\n[]\n')
    with pytest.raises(RolloutError, match="line 2 is not an answer of a step"):
        rlhf.RolloutRecord(str(tmp_path), None, ParallelDims()).write(3, nothing, torch.zeros(0, 2), 1)


def test_control_characters_of_an_answer_are_replaced_in_the_log():
    line = {"reward": 1.0, "advantage": None, "tokens": 3, "answer": "a\x1b[2Jb\r\nc", "row": 0}
    assert _scored_rollouts._format_table(1, [line]).endswith("a·[2Jb·⏎c (0)")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("model"))
    model, tokenizer = torchtune.load(folder, adapter=LoRA(rank=4, alpha=6, apply_to_mlp=True), device=DEVICE)
    torch.manual_seed(0)
    for layer in model.layers:  # an adapter in training: B is no longer zero
        torch.nn.init.normal_(layer.attn.q_proj.lora_b.weight, std=0.3)
        torch.nn.init.normal_(layer.mlp.w2.lora_b.weight, std=0.3)
    return model, tokenizer


PROMPTS = [[5, 9, 30, 31], [7, 8], [40, 41, 42, 43, 44, 45]]


def token_scores(model, batch, loss=None):
    """Scores of the tokens of a batch, and which of them have labels."""
    loss = loss or setup_loss(GRPOLoss(), model)
    scores = loss.score(model(**batch.model_inputs(), output="hidden"), batch, model.output)
    return scores, batch.labels != CROSS_ENTROPY_IGNORE_IDX


def test_the_sampler_and_the_trainer_agree_on_log_probs(tiny):
    model, tokenizer = tiny
    sampler = LocalSampler(model.train(), tokenizer, max_new_tokens=80, temperature=1.3)
    rollouts = sampler(PROMPTS, 8, [11, 22, 33])
    assert model.training, "evaluation mode ends with sampling"
    ended = [rollout for rollout in rollouts if rollout.finished]
    assert 0 < len(ended) < len(rollouts)
    assert all(rollout.answer[-1] in tokenizer.stop_tokens for rollout in ended)
    batch = collate_rollouts(rollouts, [0.5] * len(rollouts)).to(DEVICE)
    assert batch.num_labels == sum(len(rollout.answer) for rollout in rollouts), "the end is a label"
    loss = setup_loss(GRPOLoss(), model)
    loss.temperature = sampler.temperature
    scores, labelled = token_scores(model, batch, loss)
    sampled = torch.cat([rollout.log_probs for rollout in rollouts])
    torch.testing.assert_close(scores[labelled].cpu(), sampled, atol=1e-4, rtol=0)
    _, figures = loss.sum_and_metrics(batch, scores)
    total, count = figures["policy/sampler_difference"]
    assert total / count < 1e-4


def test_an_answer_depends_on_its_seed_and_number_alone(tiny):
    model, tokenizer = tiny
    sampler = LocalSampler(model, tokenizer, max_new_tokens=12)
    small_batches = LocalSampler(model, tokenizer, max_new_tokens=12, max_sequences=4)

    def answers(sampler, prompts, num_samples, seeds):
        return [rollout.answer for rollout in sampler(prompts, num_samples, seeds)]

    expected = answers(sampler, PROMPTS, 4, [11, 22, 33])
    assert answers(small_batches, PROMPTS, 4, [11, 22, 33]) == expected
    assert answers(sampler, PROMPTS[1:2], 2, [22]) == expected[4:6]
    assert len(set(map(tuple, expected))) == len(expected)
    with_other_seed = answers(sampler, PROMPTS, 4, [11, 23, 33])
    is_same = [answer == answer_of_seed for answer, answer_of_seed in zip(expected, with_other_seed, strict=True)]
    assert is_same == [True] * 4 + [False] * 4 + [True] * 4


def test_sampled_tokens_follow_the_softmax(tiny):
    """20,000 first tokens of one prompt against the model's softmax: χ² over the tokens that are expected often."""
    model, tokenizer = tiny
    sampler = LocalSampler(model, tokenizer, max_new_tokens=1, temperature=2.0)
    tokens = torch.tensor([rollout.answer[0] for rollout in sampler([PROMPTS[0]], 20_000, [3])])
    with torch.no_grad():
        p = (model(torch.tensor([PROMPTS[0]]))[0, -1] / 2.0).softmax(-1)
    counts = tokens.bincount(minlength=len(p))
    expected = 20_000 * p
    often = expected > 20
    chi = ((counts - expected)[often].square() / expected[often]).sum().item()
    freedom = int(often.sum())
    assert abs(chi - freedom) < 4 * (2 * freedom) ** 0.5


def rollout_of(length):
    """A prompt of two tokens and an answer, on the host, where samplers leave them."""
    return Rollout(torch.arange(length + 2, device="cpu"), 2, torch.full((length,), -1.0, device="cpu"), True)


def test_batches_have_every_rollout_once_within_tokens_per_batch():
    rollouts = [rollout_of(n) for n in (3, 9, 2, 2, 30, 1)]
    values = [float(i) for i in range(len(rollouts))]
    options = {"dims": ParallelDims(), "blank": [1], "count_documents": True}
    batches, terms, labels = rlhf.rollout_batches(rollouts, values, tokens_per_batch=14, **options)
    assert (terms, labels) == (6, 47)
    assert [batch.num_documents for batch in batches] == [2, 2, 1, 1]
    advantages = torch.cat([batch["advantages"][batch.labels != CROSS_ENTROPY_IGNORE_IDX] for batch in batches])
    expected = []
    for value, rollout in zip(values, rollouts, strict=True):
        expected += [value] * len(rollout.answer)
    assert advantages.tolist() == expected
    assert batches[0].tokens[0].tolist() == [0, 1, 2, 3, *range(10)]
    assert batches[0].labels[0].tolist() == [-100, 2, 3, 4, -100, *range(2, 11)]


@pytest.mark.parametrize("normalize", ["tokens", "sequences"])
def test_cross_entropy_is_the_mean_over_tokens_of_good_answers_however_they_are_split(normalize):
    values = torch.tensor([[1.0, -1.0], [-0.5, 0.5]], dtype=torch.float64, device="cpu")
    rollouts = [rollout_of(length) for length in (3, 7, 2, 4)]
    prompts = [rlhf.Prompt([0, 1], {}, number) for number in range(2)]
    scored = rlhf.ScoredRollouts(prompts, rollouts, [""] * 4, values, {})
    loss = GRPOLoss(rl_coeff=0.0, ce_coeff=0.5, normalize=normalize)
    for tokens_per_batch in (8, 100):
        batches, terms, _ = scored.batches(values, loss, ParallelDims(), tokens_per_batch)
        # Label n has the log-prob -n.
        totals = []
        for batch in batches:
            total, _ = loss.sum_and_metrics(batch, -batch.labels.clamp(min=0).double())
            totals.append(total)
        expected = 0.5 * (sum(range(2, 5)) + sum(range(2, 6))) / (3 + 4)
        assert sum(totals).item() / terms == pytest.approx(expected, rel=1e-6)


def test_a_rank_without_answers_logs_the_same_metrics():
    """A server may give no log-probs: a blank batch that has some would log a figure that no other process sums."""

    @dataclass(eq=False)
    class TwoProcesses(ParallelDims):
        unknown: int = 0  # batches without log-probs of the other one

        def sum(self, *numbers):
            return [numbers[0] + 1, numbers[1] + 2, numbers[2] + self.unknown]

        def max(self, number):
            return 1

    noted = []
    for unknown in (0, 1):
        batches, terms, _ = rlhf.rollout_batches(
            [], [], tokens_per_batch=9, dims=TwoProcesses(unknown=unknown), blank=[1, 2]
        )
        _, figures = GRPOLoss().sum_and_metrics(batches[0], torch.zeros_like(batches[0].tokens, dtype=torch.float32))
        noted.append("policy/sampler_difference" in figures)
        assert (batches[0].num_labels, terms) == (0, 1)
    assert noted == [True, False]


def test_invalid_settings_of_samplers_losses_and_rewards_are_refused(tiny):
    with pytest.raises(RolloutError, match="temperature is 0"):
        LocalSampler(*tiny, temperature=0)
    with pytest.raises(TypeError, match="top_k"):
        LocalSampler(*tiny, top_k=5)
    with pytest.raises(ValueError, match="constant"):
        GRPOLoss(normalize="constant")
    batch = collate_rollouts([Rollout(torch.arange(4, device="cpu"), 2, None, True)], [1.0])
    assert "sampled" not in batch
    with pytest.raises(RolloutError, match="two of the name"):
        RewardSum([rewards.ExactMatch(), rewards.ExactMatch("a")])
    assert replace(batch, terms=0).num_terms == 0
    assert ParallelDims().max(3) == 3
