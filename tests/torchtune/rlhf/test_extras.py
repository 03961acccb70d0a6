"""Rewards and problems of packages that are extras, where those are installed."""

import pytest

from tests.tiny import write_checkpoint
from torchtune.data import DataError
from torchtune.datasets import reasoning_gym_dataset
from torchtune.rlhf import RewardSum, RolloutError
from torchtune.rlhf.reward_functions import ExactMatch, MathReward, ReasoningGymReward
from torchtune.tokenizers import hf_tokenizer


def test_mathematics_is_compared_by_value():
    pytest.importorskip("math_verify", reason="the extra math is not installed")
    rows = [{"answer": right} for right in (r"$\frac{1}{2}$", "5", "$x^2+1$", "5", "")]
    texts = ["It is $0.5$.", "I get 5.", "$1 + x^2$", "6", "5"]
    assert MathReward()(rows, texts) == [1.0, 1.0, 1.0, 0.0, None]


def test_problems_of_reasoning_gym_have_prompts_answers_and_scores(tmp_path):
    gym = pytest.importorskip("reasoning_gym", reason="the extra reasoning-gym is not installed")
    tokenizer = hf_tokenizer(str(write_checkpoint(tmp_path / "checkpoint")))
    dataset = reasoning_gym_dataset(tokenizer, environment="chain_sum", size=5, seed=3, max_terms=2)
    rows = list(gym.create_dataset("chain_sum", size=5, seed=3, max_terms=2))
    assert [dataset[i]["row"] for i in range(len(dataset))] == rows
    assert rows[0]["question"] in tokenizer.decode(dataset[0]["tokens"])
    right = [row["answer"] for row in rows]
    wordy = [f"{99 - i} or {answer}" for i, answer in enumerate(right)]
    assert ExactMatch()(rows, right) == ReasoningGymReward()(rows, right) == [1.0] * 5
    assert ReasoningGymReward(r"-?\d+$")(rows, [*wordy[:4], "none"]) == [1.0] * 4 + [0.0]
    assert all(0 < score < 1 for score in ReasoningGymReward()(rows, wordy)), "its own score pays for containing it"
    with pytest.raises(DataError, match=r"'chainsum' .* cannot be made .*: correct the name of the environment"):
        reasoning_gym_dataset(tokenizer, environment="chainsum")
    with pytest.raises(RolloutError, match="fails for row 0: the row has no column 'metadata'"):
        RewardSum([ReasoningGymReward()])([{}], ["5"])
