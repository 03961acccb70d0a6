"""Penalties of a reward model's scores, and the warning when they replace all scores."""

import logging

import pytest
import torch

from tests.tiny import write_checkpoint
from torchtune.modules import classifier_model
from torchtune.rlhf import RewardModel, Rollout
from torchtune.tokenizers import hf_tokenizer

SHORT = Rollout(torch.tensor([5, 6, 7]), prompt_len=2, log_probs=None, finished=True)
UNFINISHED = Rollout(torch.tensor([5, 6, 7, 8, 9]), prompt_len=2, log_probs=None, finished=False)
GOOD = Rollout(torch.tensor([5, 6, 7, 8, 2]), prompt_len=2, log_probs=None, finished=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def make_reward_model(checkpoint):
    def make(**settings):
        model = classifier_model(1, "torchtune.models.from_hf_config", checkpoint_dir=checkpoint)
        return RewardModel(model, hf_tokenizer(str(checkpoint)), **settings)

    return make


def test_penalty_replaces_scores_of_short_and_unfinished_answers(make_reward_model, caplog):
    reward_model = make_reward_model(penalty=-2.0, penalise_no_eos=True, min_response_length=2)
    scores = reward_model.apply_penalty([SHORT, UNFINISHED, GOOD], torch.ones(3))
    assert scores.tolist() == [-2.0, -2.0, 1.0]
    assert "reward_penalty" not in caplog.text


@pytest.mark.parametrize(
    ("settings", "rollouts", "reason", "remedy"),
    [
        (
            {"min_response_length": 2},
            [SHORT, SHORT],
            "2 are shorter than min_response_length=2",
            "lower min_response_length",
        ),
        (
            {"penalise_no_eos": True},
            [UNFINISHED, UNFINISHED],
            "2 have not ended",
            "raise max_generated_tokens, or set penalise_no_eos=False",
        ),
        (
            {"penalise_no_eos": True, "min_response_length": 2},
            [UNFINISHED, SHORT, SHORT],
            "1 have not ended and 2 are shorter than min_response_length=2",
            "raise max_generated_tokens, or set penalise_no_eos=False, and lower min_response_length",
        ),
    ],
    ids=["short", "unfinished", "both"],
)
def test_warning_names_why_all_answers_are_penalized(settings, rollouts, reason, remedy, make_reward_model, caplog):
    caplog.set_level(logging.WARNING)
    make_reward_model(**settings).apply_penalty(rollouts, torch.ones(len(rollouts)))
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.endswith(f"of which {reason}: no score counts, so {remedy}.")


def test_scores_do_not_depend_on_the_answers_per_forward_pass(make_reward_model):
    rollouts = [SHORT, UNFINISHED, GOOD, SHORT, GOOD]
    reward_model = make_reward_model(batch_size=2)
    passes = []
    reward_model.model.register_forward_hook(lambda *_: passes.append(None))
    scores = reward_model(rollouts)
    assert len(passes) == 3
    reward_model._batch_size = None
    torch.testing.assert_close(scores, reward_model(rollouts))
    assert len(passes) == 4
    assert len(scores.unique()) == 3
