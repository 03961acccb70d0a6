"""Rewards: what an answer gets, and which rows an error names."""

import math
from functools import partial

import pytest
import torch

from tests.tiny import write_checkpoint
from torchtune.data import DataError
from torchtune.datasets import reasoning_gym_dataset
from torchtune.rlhf import RewardSum, RolloutError
from torchtune.rlhf import reward_functions as rewards
from torchtune.tokenizers import hf_tokenizer

ORDER = {"answer": '{"name":"Nora","count":77,"city":null}', "question": "2 + 2", "steps": "2 * 3\n#### -1,200.5"}


def one_more(rows, texts):
    return [1.0] * (len(texts) + 1)


def fails_on_b(rows, texts):
    return [1.0 / (text != "b") for text in texts]


def by_row(rows, texts):
    return dict.fromkeys(range(len(texts)), 1.0)


def nan_on_b(rows, texts):
    values = dict.fromkeys(texts)  # None: the answer cannot be scored
    values["b"] = math.nan
    return [values[text] for text in texts]


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


def test_json_fields_tell_booleans_from_numbers_at_any_depth():
    row = {"answer": {"flags": [True, {"on": 1}], "count": 1}}
    reward = rewards.JSONFields()
    assert reward([row], ['{"flags": [true, {"on": 1.0}], "count": 1}']) == [1.0]
    assert reward([row], ['{"flags": [1, {"on": 1}], "count": 1}']) == [0.5]
    assert reward([row], ['{"flags": [true, {"on": true}], "count": true}']) == [0.0]


def test_rewards_add_up_with_their_weights_and_none_drops_an_answer():
    def sometimes(rows, texts):
        rows[0].clear()  # the others see what is in the data
        values = dict.fromkeys(texts, 2.0)
        values["b"] = None
        return [values[text] for text in texts]

    scores = RewardSum([sometimes, rewards.ExactMatch("a", weight=0.5)])([{"a": "x"}] * 3, ["x", "b", "c"])
    assert scores.total[::2] == [2.5, 2.0]
    assert math.isnan(scores.total[1])
    assert scores.parts["ExactMatch"] == [1.0, 0.0, 0.0]


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
    reward = rewards.FunctionReward(one_more, weight=2.0)
    assert (reward.name, reward.weight, reward([{}], ["a"])) == ("one_more", 2.0, one_more([{}], ["a"]))
    assert rewards.FunctionReward(partial(one_more), name="more")([{}], ["a"]) == one_more([{}], ["a"])
    with pytest.raises(RolloutError, match=r"returned tensor.* for row 0: it must return finite numbers"):
        RewardSum([lambda rows, texts: torch.ones(1, 2)])([{}], ["a"])
    assert RewardSum([lambda rows, texts: [1.0 / len(texts)]])([], []).total == [], "no answer, no call"


def test_mathematics_is_compared_by_value():
    pytest.importorskip("math_verify", reason="the extra math is not installed")
    rows = [{"answer": right} for right in (r"$\frac{1}{2}$", "5", "$x^2+1$", "5", "")]
    texts = ["It is $0.5$.", "I get 5.", "$1 + x^2$", "6", "5"]
    assert rewards.MathReward()(rows, texts) == [1.0, 1.0, 1.0, 0.0, None]


def test_problems_of_reasoning_gym_have_prompts_answers_and_scores(tmp_path):
    gym = pytest.importorskip("reasoning_gym", reason="the extra reasoning-gym is not installed")
    tokenizer = hf_tokenizer(str(write_checkpoint(tmp_path / "checkpoint")))
    dataset = reasoning_gym_dataset(tokenizer, environment="chain_sum", size=5, seed=3, max_terms=2)
    rows = list(gym.create_dataset("chain_sum", size=5, seed=3, max_terms=2))
    assert [dataset[i]["row"] for i in range(len(dataset))] == rows
    assert rows[0]["question"] in tokenizer.decode(dataset[0]["tokens"])
    right = [row["answer"] for row in rows]
    wordy = [f"{99 - i} or {answer}" for i, answer in enumerate(right)]
    assert rewards.ExactMatch()(rows, right) == rewards.ReasoningGymReward()(rows, right) == [1.0] * 5
    assert rewards.ReasoningGymReward(r"-?\d+$")(rows, [*wordy[:4], "none"]) == [1.0] * 4 + [0.0]
    assert all(0 < score < 1 for score in rewards.ReasoningGymReward()(rows, wordy)), (
        "its own score pays for containing it"
    )
    with pytest.raises(DataError, match=r"'chainsum' .* cannot be made .*: correct the name of the environment"):
        reasoning_gym_dataset(tokenizer, environment="chainsum")
    with pytest.raises(RolloutError, match="fails for row 0: the row has no column 'metadata'"):
        RewardSum([rewards.ReasoningGymReward()])([{}], ["5"])
