"""What the recipes that sample have of their own: rollouts that come back, steps that teach nothing, shared work."""

import re

import pytest
import torch

from tests.recipes.runs import resume, start
from torchtune.data import DataError
from torchtune.modules.loss import LossError
from torchtune.rlhf import RolloutError, _scored_rollouts
from torchtune.utils import UserError

FULL, LORA = "full_grpo_single_device", "lora_grpo_single_device"
SGD = {"optimizer": {"_component_": "torch.optim.SGD", "lr": 0.5}, "lr_scheduler": None, "shuffle": False}


def words(rows, texts):
    """The share of letters, which a few steps raise."""
    rewards = []
    for text in texts:
        num_letters = sum(character.isalpha() for character in text)
        rewards.append(num_letters / 16)
    return rewards


WORDS = [{"_component_": "torchtune.rlhf.reward_functions.FunctionReward", "function": f"{__name__}.words"}]


def test_rewards_rise_and_everything_is_written_down(tmp_path):
    settings = {"rewards": WORDS, "num_samples": 8, "epochs": 3, "dataset_val": "${dataset}", "batch_size_val": 24}
    run = start(FULL, tmp_path, **settings, run_val_every_n_steps=12, batch_size=6, log_level="INFO")
    rewards = run.figure("rewards/total")
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.2
    val = run.figure("val_rewards/words")
    assert len(val) == 1
    lines = run.lines()
    assert len(lines) == 3 * 24 * 8
    group = lines[:8]
    assert {line["row"] for line in group} == {group[0]["row"]}
    mean = sum(line["reward"] for line in group) / 8
    for line in group:
        assert line["advantage"] == pytest.approx(line["reward"] - mean, abs=1e-5)
        assert line["reward"] == pytest.approx(words([], [line["answer"]])[0], abs=1e-5)
    assert sum(line["reward"] for line in lines if line["step"] == 1) / 48 == pytest.approx(rewards[0], abs=1e-5)
    assert max(run.figure("policy/sampler_difference")) < 1e-4


def test_a_shared_prompt_is_computed_once_and_changes_nothing(tmp_path):
    settings = {**SGD, "batch_size": 2, "tokens_per_batch": 150, "num_iterations": 2, "max_steps_per_epoch": 2}
    shared, apart = (start(LORA, tmp_path, **settings, rewards=WORDS, share_prefix=share) for share in (None, False))
    assert shared.lines() == apart.lines()
    assert shared.losses == pytest.approx(apart.losses, abs=1e-6)
    assert shared.figure("grad_norm") == pytest.approx(apart.figure("grad_norm"), rel=1e-4)
    for name, value in apart.trained.items():
        torch.testing.assert_close(shared.trained[name], value, atol=1e-5, rtol=0)
    assert shared.recipe.shares_prefix
    assert max(shared.figure("policy/sampler_difference")) < 1e-4


def test_compiled_layers_train_and_do_not_sample(tmp_path, monkeypatch):
    """A batch of answers that shrinks and grows would use up what the compiler may make, and leave nothing to train."""
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "eager")
    settings = {**SGD, "max_steps_per_epoch": 1, "rewards": WORDS}
    plain = start(FULL, tmp_path, **settings)
    for recomputed in (False, True):
        torch._dynamo.reset()
        counters.clear()
        compiled = start(FULL, tmp_path, **settings, compile=True, enable_activation_checkpointing=recomputed)
        assert counters["stats"]["unique_graphs"] == 1, "one length"
        assert compiled.lines() == plain.lines()
        assert compiled.losses == pytest.approx(plain.losses, abs=1e-6)


@pytest.mark.parametrize("name", [FULL, LORA])
def test_a_resumed_run_samples_the_same_answers_and_ends_in_the_same_weights(name, tmp_path):
    settings = {"save_every_n_steps": 2, "max_steps_per_epoch": 5, "num_iterations": 2, "batch_size": 3}
    settings["loss"] = {"_component_": "torchtune.rlhf.loss.GRPOLoss", "kl_coeff": 0.1}
    uninterrupted = start(name, tmp_path, **settings)
    # The run was killed in step 4, after the checkpoint of step 2.
    lines = (uninterrupted.output_dir / "rollouts.jsonl").read_text().splitlines(keepends=True)
    killed = {"rollouts.jsonl": "".join(lines[: 3 * 12 + 5]) + lines[-1][:30]}
    resumed = resume(name, tmp_path, uninterrupted, 2, killed, **settings)
    assert (resumed.output_dir / "rollouts.jsonl").read_text() == "".join(lines)


@pytest.mark.parametrize("normalize", ["tokens", "sequences"])
def test_micro_batches_change_nothing(normalize, tmp_path):
    loss = {"_component_": "torchtune.rlhf.loss.GRPOLoss", "normalize": normalize}
    settings = {**SGD, "loss": loss, "max_steps_per_epoch": 2, "num_samples": 3}
    unsplit = start(FULL, tmp_path, **settings, batch_size=6)
    split = start(FULL, tmp_path, **settings, batch_size=2, gradient_accumulation_steps=3, tokens_per_batch=70)
    assert split.figure("grad_norm") == pytest.approx(unsplit.figure("grad_norm"), rel=1e-4)
    for key, value in unsplit.trained.items():
        torch.testing.assert_close(split.trained[key], value, atol=1e-5, rtol=0)


def test_steps_that_teach_nothing_change_nothing_and_too_many_end_the_run(tmp_path, monkeypatch, caplog):
    same = [{"_component_": "torchtune.rlhf.reward_functions.RegexMatch", "pattern": ""}]
    run = start(FULL, tmp_path, rewards=same, max_steps_per_epoch=2, log_level="INFO")
    assert run.figure("groups/without_variance") == [1.0, 1.0]
    assert run.figure("grad_norm") == [0.0, 0.0]
    message = "Step 1 teaches nothing: rewards differ in 0 of 2 groups, and of 8 answers 8 have a reward and "
    assert message in caplog.text
    before = start(FULL, tmp_path, train=False).trained
    assert all(torch.equal(value, run.trained[key]) for key, value in before.items())
    assert _scored_rollouts.MOST_STALE_STEPS == 300
    monkeypatch.setattr(_scored_rollouts, "MOST_STALE_STEPS", 3)
    with pytest.raises(RolloutError, match="3 steps in a row taught nothing; in the last one rewards differ in 0 of 2"):
        start(FULL, tmp_path, rewards=same)


def test_answers_that_cannot_be_scored_are_dropped_and_counted(tmp_path):
    run = start(FULL, tmp_path, rewards=NONE, max_steps_per_epoch=1, num_samples=6, batch_size=4)
    lines = run.lines()
    unknown = [line for line in lines if line["reward"] is None]
    assert 0 < len(unknown) < len(lines)
    assert run.figure("answers/dropped") == [pytest.approx(len(unknown) / len(lines))]


def none_for_some(rows, texts):
    rewards = []
    for text in texts:
        reward = float(len(text))
        if len(text) % 3 == 0:
            reward = None
        rewards.append(reward)
    return rewards


NONE = [{"_component_": "torchtune.rlhf.reward_functions.FunctionReward", "function": f"{__name__}.none_for_some"}]


def test_a_teacher_pulls_the_student_towards_it(tmp_path):
    from tests.recipes.test_preferences import other_model

    start(FULL, tmp_path, train=False)
    settings = {"loss": {"_component_": "torchtune.rlhf.loss.OnPolicyDistillationLoss"}, "rewards": []}
    settings |= {"ref_checkpointer": other_model(tmp_path, width=48), "num_samples": 8, "batch_size": 8, "epochs": 6}
    settings["ref_model"] = {"_component_": "torchtune.models.from_hf_config", "checkpoint_dir": f"{tmp_path}/other"}
    run = start(FULL, tmp_path, **settings, clip_grad_norm=1.0, optimizer__lr=0.02)
    kl = run.figure("policy/kl")
    assert sum(kl[-3:]) < 0.75 * sum(kl[:3])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"loss": {"_component_": "torchtune.rlhf.loss.DPOLoss"}}, "DPOLoss does not train on sampled answers"),
        ({"rewards": []}, "rewards.*is empty"),
        ({"num_samples": 1}, "num_samples.*is 1"),
        ({"sampler__max_new_tokens": 5000}, "prompt of row .* leave it out with filter_fn"),
        ({"sampler__temperature": 0.0}, "temperature is 0"),
        ({"sampler__top_p": 0.9}, "top_p"),
        (
            {"loss": {"_component_": "torchtune.rlhf.loss.OnPolicyDistillationLoss"}},
            "ref_checkpointer.*its own teacher",
        ),
        ({"ref_model": {"_component_": "torchtune.models.qwen3.qwen3_8b_base"}}, "ref_model.*set ref_checkpointer"),
        ({"sampler__stop_tokens": [99999]}, r"stop_tokens is \[99999\]: give token ids below"),
        ({"advantages": {"_component_": "torch.nn.ReLU"}}, "advantages: ReLU fails: TypeError"),
        ({"dataset__column": "question"}, "rows 0, 1, .*no column 'question'"),
        (
            {"rewards": [{"_component_": "torchtune.rlhf.reward_functions.ExactMatch", "column": "right"}]},
            "'ExactMatch' fails for rows .*no column 'right'",
        ),
    ],
)
def test_settings_that_do_not_fit_rollouts_are_refused_in_one_sentence(settings, said, tmp_path):
    with pytest.raises((UserError, LossError, DataError)) as caught:
        start(FULL, tmp_path, max_steps_per_epoch=1, **settings)
    assert re.search(said, str(caught.value), re.DOTALL), str(caught.value)


def test_two_processes_train_as_one(forker, tmp_path):
    """Answers depend on row and step alone, so that ranks that share the prompts make the same step."""
    settings = {**SGD, "clip_grad_norm": 1.0, "max_steps_per_epoch": 2, "num_samples": 3}
    for kind, split, batch_size in (
        ("full", "data_parallel_shard_dim", 2),
        ("lora", "tensor_parallel_dim", 4),
    ):
        how = {**settings, split: 2, "batch_size": batch_size}
        run = forker.run_on_two(f"{kind}_grpo_distributed", tmp_path, **how)
        single_process = start(f"{kind}_grpo_single_device", tmp_path, **settings, batch_size=4)
        for value in ("rewards/total", "grad_norm", "policy/ratio", "answers/tokens"):
            assert run.figure(value) == pytest.approx(single_process.figure(value), rel=1e-3), (split, value)
        files = ["rollouts.jsonl", "rollouts_rank1.jsonl"][: 2 if "shard" in split else 1]
        assert sorted(path.name for path in run.output_dir.glob("rollouts*")) == sorted(files)
        answers = []
        for file in files:
            answers += [(line["row"], line["answer"]) for line in run.lines(file)]
        assert sorted(answers) == sorted((line["row"], line["answer"]) for line in single_process.lines())
