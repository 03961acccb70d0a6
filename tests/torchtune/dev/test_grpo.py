"""Names of ``torchtune.dev.grpo``: what configs say is what they get."""

import pytest

from tests.tiny import write_checkpoint
from torchtune.data import DataError
from torchtune.dev.grpo.gsm8k import gsm8k_dataset, gsm8k_sft
from torchtune.dev.grpo.loss import GRPOCompletionLoss, GRPOSimpleLoss
from torchtune.tokenizers import hf_tokenizer

ROWS = [{"question": f"Question {i}?", "answer": f"Think {i}.\n#### 1,{i:03d}"} for i in range(10)]


def test_gsm8k_has_prompts_for_rewards_and_texts_for_training(tmp_path):
    tokenizer = hf_tokenizer(str(write_checkpoint(tmp_path / "checkpoint")))
    prompts = gsm8k_dataset(tokenizer, source=ROWS, partition="1-9/10")
    assert [prompts[i]["row"]["answer"] for i in range(len(prompts))] == [str(1000 + i) for i in range(1, 10)]
    assert prompts[0]["row"]["cot"] == "Think 1."
    assert "User: Question 1? Assistant: " in tokenizer.decode(prompts[0]["tokens"])
    example = gsm8k_sft(tokenizer, source=ROWS, partition="0/10")[0]
    trained = [label for label in example["labels"] if label != -100]
    assert tokenizer.decode(trained).strip() == "<think>Think 0.</think> <answer>1000</answer>"
    for partition in ("3/2", "9-1/10", "half"):
        with pytest.raises(DataError, match="write k/n or i-k/n"):
            gsm8k_dataset(tokenizer, source=ROWS, partition=partition)
    with pytest.raises(DataError, match="gsm8k: row 1: a row of GSM8K has"):
        gsm8k_dataset(tokenizer, source=[ROWS[0], {"question": "?", "answer": "5"}])


def test_losses_have_the_defaults_of_their_names():
    simple = GRPOSimpleLoss()
    completion = GRPOCompletionLoss(epsilon=0.3, kl_coeff=0.0)
    assert (simple.epsilon, simple.epsilon_high, simple.kl_coeff, simple.normalize) == (0.1, 0.1, 0.1, "sequences")
    assert (completion.epsilon, completion.kl_coeff, completion.normalize) == (0.3, 0.0, "tokens")


@pytest.mark.parametrize("name", ["generation", "rewards"])
def test_modules_that_are_gone_name_their_replacement(name):
    with pytest.raises(
        ImportError, match=rf"torchtune.dev.grpo.{name} is not part of this library: use torchtune.rlhf"
    ):
        __import__(f"torchtune.dev.grpo.{name}")
