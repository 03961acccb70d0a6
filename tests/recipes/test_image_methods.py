"""Preferences, rewards and distillation with a model of image tokens: images are seen, and two ranks train as one."""

import pytest
import torch

from tests.recipes.runs import start
from tests.recipes.test_distributed import close
from tests.tiny import write_lines
from tests.tiny_images import image_text_model, qwen3_vl_config, write_image_checkpoint, write_pictures

COMPONENTS = {
    "dpo": "torchtune.datasets.preference_dataset",
    "grpo": "torchtune.datasets.prompt_dataset",
    "knowledge_distillation": "torchtune.datasets.multimodal.vqa_dataset",
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = tmp_path_factory.mktemp("methods")
    for name, seed in (("checkpoint", 0), ("teacher", 1)):
        torch.manual_seed(seed)
        write_image_checkpoint(image_text_model(qwen3_vl_config()), path / name)
    write_pictures(path, count=6)
    return path


def settings_of(method, base, trained="projector"):
    """Settings of a recipe that trains one part; every second row is text alone."""
    rows = []
    for index, color in enumerate(["r", "g", "b"] * 2):
        answers = {"chosen": color, "rejected": "no", "output": color, "answer": color}
        rows.append({"prompt": "<image>?", "input": "?", "image": str(base / f"{index}.png"), **answers})
        rows.append({"prompt": "why", "input": "why", "image": None, **answers})
    source = str(write_lines(base / f"{method}.jsonl", rows))
    parts = dict.fromkeys(("vision_tower", "projector", "language_model"), "frozen") | {trained: "full"}
    model = {"_component_": "torchtune.models.image_text_model", "checkpoint_dir": str(base / "checkpoint"), **parts}
    settings = {
        "model": model,
        "tokenizer": {"_component_": "torchtune.models.image_text_transform", "path": str(base / "checkpoint")},
        "dataset": {"_component_": COMPONENTS[method], "source": source},
        "shuffle": False,
        "lr_scheduler": None,
        "batch_size": 2,
        "max_steps_per_epoch": 2,
    }
    if method == "knowledge_distillation":
        settings["teacher_model"] = {**model, "checkpoint_dir": str(base / "teacher")}
    if method == "grpo":
        reward = {"_component_": "torchtune.rlhf.reward_functions.LengthReward", "target": 0, "limit": 40}
        settings |= {"num_samples": 4, "rewards": [reward]}
    return settings


def moved(run, before):
    return [name for name, value in before.trained.items() if not torch.equal(value, run.trained[name])]


@pytest.mark.parametrize("method", COMPONENTS)
def test_the_projector_learns_which_only_images_can_teach(method, base):
    settings = settings_of(method, base)
    before = start(method, base, **settings, train=False)
    run = start(method, base, **settings)
    assert moved(run, before) == list(before.trained)
    assert all("projector" in name for name in before.trained)
    if method == "grpo":  # what was sampled with images has the log-probs of what is trained on
        assert max(record["policy/sampler_difference"] for record in run.records) < 1e-4
    if method == "dpo":  # the reference sees the images, too
        assert run.losses[1] == pytest.approx(0.6931, abs=1e-4)


@pytest.mark.parametrize("method", COMPONENTS)
def test_two_ranks_train_as_one_though_one_has_text_alone(method, base, forker):
    settings = {**settings_of(method, base, "language_model"), "clip_grad_norm": 1.0}
    alone = start(method, base, **settings)
    run = forker.run_on_two(method, base, **{**settings, "batch_size": 1})
    norms = {record["step"]: record["grad_norm"] for record in run.records}
    expected = {record["step"]: record["grad_norm"] for record in alone.records}
    close(norms, expected, {1, 2})  # the loss of the first update on rewards is 0
