"""Losses, advantages, rewards and rollouts of GRPO, against plain formulas in float64."""

import math
import statistics
from dataclasses import dataclass, replace
from functools import partial
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
    total, at = torch.zeros((), dtype=torch.float64), 0
    for length, given in zip(LENGTHS, values, strict=True):
        here = slice(at, at + length)
        of_sequence = torch.zeros((), dtype=torch.float64)
        for t in range(here.start, here.stop):
            whole = torch.exp((now[here] - old[here]).sum() / length)
            rho = whole if loss.ratio == "sequence" else torch.exp(now[t] - old[t])
            advantage = given if loss.needs_rewards else 0.0
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
            of_sequence = of_sequence + term
        share = {"tokens": 1 / sum(LENGTHS), "sequences": 1 / length / len(LENGTHS)}
        total = total + of_sequence * (share.get(loss.normalize) or 1 / (loss.constant * len(LENGTHS)))
        if given > 0:  # the mean over the tokens of good answers
            total = total - loss.ce_coeff * now[here].sum() / sum(compress(LENGTHS, [one > 0 for one in values]))
        at += length
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
    count, values = sum(LENGTHS), [1.0, -0.5, -2.0, 0.3]
    old = numbers(count, 1.0, 0) - 3.0
    ref, sampled = old + numbers(count, 0.3, 2), old + numbers(count, 0.2, 3)
    now = (old + numbers(count, 0.3, 1)).requires_grad_()
    sequences = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    given = torch.tensor(values, dtype=torch.float64)[sequences]
    reference = ref if loss.needs_reference else None
    terms = loss.num_terms(count, len(LENGTHS))
    weights = {"ce": (given > 0).double() * (terms / int((given > 0).sum()))} if loss.ce_coeff else None
    losses, figures = loss(now, old, given, sequences, reference, sampled, weights)
    mean = losses.sum() / terms
    expected = by_hand(loss, now, old, values, ref, sampled)
    torch.testing.assert_close(mean, expected, atol=1e-9, rtol=0)
    ours, theirs = (torch.autograd.grad(one, now)[0] for one in (mean, expected))
    torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=0)
    assert ours.abs().max() > 1e-3
    assert ("kl" in figures) == loss.needs_reference
    if loss.kind == "ppo" and loss.kl_coeff == 0:
        assert 0 < figures["clipped"].mean() < 1


def test_advantages_follow_the_formula():
    given = [[1.0, 0.0, 0.5, 0.0], [1.0, 1.0, 1.0, 1.0], [2.0, math.nan, -1.0, 0.0]]
    group = torch.tensor(given, dtype=torch.float64)
    known = [[value for value in row if not math.isnan(value)] for row in given]
    spread = statistics.stdev(value for row in known for value in row)
    plain, others, scaled, batch = (
        GroupAdvantages(**options)(group)
        for options in ({}, {"leave_one_out": True}, {"scale": "group"}, {"scale": "batch"})
    )
    for i, row in enumerate(given):
        for j, value in enumerate(row):
            if math.isnan(value):
                assert all(math.isnan(one[i, j]) for one in (plain, others, scaled, batch))
                continue
            centred = value - statistics.mean(known[i])
            rest = [known[i][k] for k in range(len(known[i])) if k != known[i].index(value)]
            assert plain[i, j].item() == pytest.approx(centred, abs=1e-12)
            assert others[i, j].item() == pytest.approx(value - statistics.mean(rest), abs=1e-12)
            assert scaled[i, j].item() == pytest.approx(centred / (statistics.stdev(known[i]) + 1e-4), abs=1e-12)
            assert batch[i, j].item() == pytest.approx(centred / (spread + 1e-4), abs=1e-12)
    assert rlhf.has_variance(group).tolist() == [True, False, True]
    assert abs(plain.nansum(1)).max() < 1e-12, "centered: the mean is not added back"


ORDER = {"answer": '{"name":"Nora","count":77,"city":null}', "question": "2 + 2", "steps": "2 * 3\n#### -1,200.5"}


def one_more(rows, texts):
    return [1.0] * (len(texts) + 1)


def fails_on_b(rows, texts):
    return [1.0 / (text != "b") for text in texts]


def by_row(rows, texts):
    return dict.fromkeys(range(len(texts)), 1.0)


def nan_on_b(rows, texts):
    return [math.nan if text == "b" else None for text in texts]


@pytest.mark.parametrize(
    ("reward", "text", "expected"),
    [
        (rewards.ExactMatch(), f" {ORDER['answer']}\n", 1.0),
        (rewards.ExactMatch(), "nora", 0.0),
        (rewards.ExactMatch("question", pattern=r"<a>(.*?)</a>"), "<a>1</a> no: <a>2 + 2</a>", 1.0),
        (rewards.ExactMatch("question", pattern=r"<a>(.*?)</a>"), "2 + 2", 0.0),
        (rewards.NumberMatch("steps"), "So 1,200 and 3: it is -1200.50.", 1.0),
        (rewards.NumberMatch("steps"), "-1200.50 or 3", 0.0),
        (rewards.RegexMatch(r"\d"), "in 3\nlines", 1.0),
        (rewards.RegexMatch(r"<think>.*</think>.+", whole=True), "<think>a\nb</think> 4", 1.0),
        (rewards.RegexMatch(r"<think>.*</think>.+", whole=True), "so <think>a</think> 4", 0.0),
        (rewards.JSONFields(), '{"name": "Nora", "count": 77, "city": "Bern"}', 2 / 3),
        (rewards.JSONFields(), '{"name": "Nora", "count": 77, "city": null, "day": null}', 3 / 4),
        (rewards.JSONFields(), '["Nora"]', 0.0),
        (rewards.LengthReward(4, 8), "123456", 0.5),
        (rewards.LengthReward(4, 8), "12", 1.0),
    ],
)
def test_reward_functions_score_an_answer(reward, text, expected):
    assert reward([ORDER], [text]) == pytest.approx([expected])


def test_rewards_add_up_with_their_weights_and_none_drops_an_answer():
    def sometimes(rows, texts):
        rows[0].clear()  # the others see what is in the data
        return [None if text == "b" else 2.0 for text in texts]

    found = RewardSum([sometimes, rewards.ExactMatch("a", weight=0.5)])([{"a": "x"}] * 3, ["x", "b", "c"])
    assert found.total[::2] == [2.5, 2.0]
    assert math.isnan(found.total[1])
    assert found.parts["ExactMatch"] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("one_more", "'one_more' returned 4 values for 3 answers"),
        ("fails_on_b", "'fails_on_b' fails for row 7: ZeroDivisionError"),
        ("nan_on_b", "'nan_on_b' returned nan for row 7"),
        ("by_row", "'by_row' fails for rows 5, 7, 9: it returned a dict, and it must return a list"),
    ],
)
def test_errors_of_a_reward_function_name_the_rows(function, words):
    reward = rewards.FunctionReward(f"{__name__}.{function}")
    with pytest.raises(RolloutError, match=words):
        RewardSum([reward])([{}] * 3, ["a", "b", "c"], [5, 7, 9])


def test_rewards_without_weight_or_function_are_refused():
    with pytest.raises(RolloutError, match="every weight is 0"):
        RewardSum([rewards.ExactMatch(weight=0)])
    with pytest.raises(ValueError, match="'math' is a module: name a function"):
        rewards.FunctionReward("math")
    with pytest.raises(ValueError, match="3 is a int: name a function"):
        rewards.FunctionReward(3)
    own = rewards.FunctionReward(one_more, weight=2.0)
    assert (own.name, own.weight, own([{}], ["a"])) == ("one_more", 2.0, one_more([{}], ["a"]))
    assert rewards.FunctionReward(partial(one_more), name="more")([{}], ["a"]) == one_more([{}], ["a"])
    with pytest.raises(RolloutError, match=r"returned tensor.* for row 0: it must return finite numbers"):
        RewardSum([lambda rows, texts: torch.ones(1, 2)])([{}], ["a"])
    assert RewardSum([lambda rows, texts: [1.0 / len(texts)]])([], []).total == [], "no answer, no call"


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
    with pytest.raises(RolloutError, match="line 2 is no answer of a step"):
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
    sampled = torch.cat([one.log_probs for one in rollouts])
    torch.testing.assert_close(scores[labelled].cpu(), sampled, atol=1e-4, rtol=0)
    _, figures = loss.sum_and_metrics(batch, scores)
    total, count = figures["policy/sampler_difference"]
    assert total / count < 1e-4


def test_an_answer_depends_on_its_seed_and_number_alone(tiny):
    model, tokenizer = tiny
    sampler = LocalSampler(model, tokenizer, max_new_tokens=12)
    whole = sampler(PROMPTS, 4, [11, 22, 33])
    again = LocalSampler(model, tokenizer, max_new_tokens=12, max_sequences=4)(PROMPTS, 4, [11, 22, 33])
    fewer = sampler(PROMPTS[1:2], 2, [22])
    assert [one.answer for one in again] == [one.answer for one in whole]
    assert [one.answer for one in fewer] == [one.answer for one in whole[4:6]]
    assert len({tuple(one.answer) for one in whole}) == len(whole)
    other = sampler(PROMPTS, 4, [11, 23, 33])
    assert [a.answer == b.answer for a, b in zip(whole, other, strict=True)] == [True] * 4 + [False] * 4 + [True] * 4


def test_sampled_tokens_follow_the_softmax(tiny):
    """20,000 first tokens of one prompt against the model's softmax: χ² over the tokens that are expected often."""
    model, tokenizer = tiny
    sampler = LocalSampler(model, tokenizer, max_new_tokens=1, temperature=2.0)
    found = torch.tensor([one.answer[0] for one in sampler([PROMPTS[0]], 20_000, [3])])
    with torch.no_grad():
        p = (model(torch.tensor([PROMPTS[0]]))[0, -1] / 2.0).softmax(-1)
    counts, expected = found.bincount(minlength=len(p)), 20_000 * p
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
    found = torch.cat([batch["advantages"][batch.labels != CROSS_ENTROPY_IGNORE_IDX] for batch in batches])
    expected = [value for value, one in zip(values, rollouts, strict=True) for _ in one.answer]
    assert found.tolist() == expected
    one = batches[0]
    assert one.tokens[0].tolist() == [0, 1, 2, 3, *range(10)]
    assert one.labels[0].tolist() == [-100, 2, 3, 4, -100, *range(2, 11)]


@pytest.mark.parametrize("normalize", ["tokens", "sequences"])
def test_cross_entropy_is_the_mean_over_tokens_of_good_answers_however_they_are_split(normalize):
    lengths, values = (3, 7, 2, 4), torch.tensor([[1.0, -1.0], [-0.5, 0.5]], dtype=torch.float64, device="cpu")
    rollouts = [rollout_of(n) for n in lengths]
    prompts = [rlhf.Prompt([0, 1], {}, number) for number in range(2)]
    scored = rlhf.ScoredRollouts(prompts, rollouts, [""] * 4, values, {})
    loss = GRPOLoss(rl_coeff=0.0, ce_coeff=0.5, normalize=normalize)
    for tokens_per_batch in (8, 100):
        batches, terms, _ = scored.batches(values, loss, ParallelDims(), tokens_per_batch)
        # Label n has the log-prob -n.
        totals = [loss.sum_and_metrics(one, -one.labels.clamp(min=0).double())[0] for one in batches]
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
