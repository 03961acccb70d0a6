"""GRPO over several turns with tools: it learns to call them, comes back after a kill, and is the same on two ranks."""

import pytest

from tests.recipes.noting import STOP
from tests.recipes.runs import resume, start
from torchtune.rlhf import RolloutError

FULL = "full_grpo_single_device"
SGD = {"optimizer": {"_component_": "torch.optim.SGD", "lr": 0.5}, "lr_scheduler": None, "shuffle": False}
EPISODES = {
    "environment": {"_component_": "tests.recipes.noting.Notes"},
    "tool_format": "by_length",
    "max_turns": 3,
    "rewards": [],
    "sampler__stop_tokens": STOP,
    "sampler__max_new_tokens": 9,
}


def test_a_policy_learns_to_call_tools_and_its_calls_are_logged(tmp_path):
    settings = {"num_samples": 4, "batch_size": 6, "epochs": 3, "optimizer__lr": 0.02, "lr_scheduler": None}
    run = start(FULL, tmp_path, **EPISODES, **settings, dataset_val="${dataset}", run_val_every_n_steps=12)
    calls = run.figure("tools/calls")
    assert sum(calls[-3:]) > 1.2 * sum(calls[:3])
    record = next(record for record in run.records if "ends/completed" in record)
    assert sum(value for name, value in record.items() if name.startswith("ends/")) == pytest.approx(1.0)
    assert record["rewards/Notes"] == record["rewards/total"]
    assert {"seconds/generate", "seconds/tools", "seconds/idle", "seconds/score"} <= record.keys()
    assert max(record["policy/sampler_difference"] for record in run.records if "loss" in record) < 1e-4
    assert any("val_tools/turns" in record for record in run.records)
    lines = run.lines()
    assert all(line["reward"] == 1 + line["calls"] for line in lines)
    assert all("Begin with nothing." in line["prompt"] for line in lines), "what the model has read"
    assert any("<|im_start|>tool" in line["episode"] and "2 notes" in line["episode"] for line in lines)
    assert {line["end"] for line in lines} > {"completed", "max_turns"}


def test_a_killed_run_draws_the_same_episodes_and_ends_bit_equal(tmp_path):
    settings = {"save_every_n_steps": 2, "max_steps_per_epoch": 4, "num_iterations": 2, "batch_size": 3}
    settings |= {"sampler__max_sequences": 6, "environment": {**EPISODES["environment"], "pause": 0.01}}
    full_run = start(FULL, tmp_path, **EPISODES | settings)
    rows = (full_run.output_dir / "rollouts.jsonl").read_text()
    settings["environment"] = {**EPISODES["environment"], "pause": 0.002}
    resumed = resume(FULL, tmp_path, full_run, 2, {"rollouts.jsonl": rows}, **EPISODES | settings)
    assert resumed.lines() == full_run.lines()


def test_two_processes_train_as_one(forker, tmp_path):
    settings = {**EPISODES, **SGD, "clip_grad_norm": 1.0, "max_steps_per_epoch": 2, "num_samples": 4}
    split = {"data_parallel_shard_dim": 2, "batch_size": 2}
    run = forker.run_on_two("full_grpo_distributed", tmp_path, **settings, **split)
    full_run = start(FULL, tmp_path, **settings, batch_size=4)
    for name in ("rewards/total", "tools/calls", "ends/completed", "grad_norm"):
        assert run.figure(name) == pytest.approx(full_run.figure(name), rel=1e-3), name
    lines = run.lines("rollouts.jsonl") + run.lines("rollouts_rank1.jsonl")
    episodes = [line["episode"] for line in lines]
    assert sorted(episodes) == sorted(line["episode"] for line in full_run.lines())


class Unrewarded:
    def reset(self) -> None:
        """Begin."""


def test_an_environment_without_a_reward_needs_one(tmp_path):
    settings = {**EPISODES, "environment": {"_component_": f"{__name__}.Unrewarded"}}
    with pytest.raises(RolloutError, match="rewards is empty, and the environment has no get_reward"):
        start(FULL, tmp_path, **settings, max_steps_per_epoch=1)
