"""Runs that are killed, for real, at any moment: nothing is lost, and the rest of the run is the same bits."""

import os
import random
import signal
import time

import pytest

from tests.recipes import killing
from tests.recipes.killing import SETTINGS, losses, said, steps_logged
from tests.recipes.runs import TRAINING, write_config
from tests.tiny import WORDS

ALONE = [name for name in TRAINING if name.endswith("single_device")]
SEVERAL = [name for name in TRAINING if name.endswith("distributed")]
STEPS = 36


@pytest.fixture(scope="module", params=ALONE)
def whole(request, forker, tmp_path_factory):
    """An uninterrupted run: recipe, folder of its inputs, losses."""
    folder = tmp_path_factory.mktemp("whole")
    config = write_config(request.param, folder, folder / "whole", **SETTINGS)
    assert forker.run(request.param, config) == 0, said(config)
    assert list(losses(folder / "whole")) == list(range(1, STEPS + 1))
    return request.param, folder, losses(folder / "whole")


def kill_and_resume(forker, whole, label, kill_when):
    """Kill a run again and again, each time resumed; return how many kills hit before the end."""
    name, folder, expected = whole
    output_dir = folder / label
    config = write_config(name, folder, output_dir, **SETTINGS)
    hits = 0
    for condition in kill_when:
        code = forker.run(name, config, "resume_from_checkpoint=True", kill_when=lambda c=condition: c(output_dir))
        assert code in (0, -signal.SIGKILL), said(config)
        if code == 0:
            break
        hits += 1
    else:
        assert forker.run(name, config, "resume_from_checkpoint=True") == 0, said(config)
    assert losses(output_dir) == expected
    return hits


def test_killed_at_random_steps(forker, whole):
    rng = random.Random(0)

    def after_steps(extra):
        seen = []

        return lambda output: killing.after(extra, seen, output)

    kills = [after_steps(rng.randint(2, 6)) for _ in range(3)]
    assert kill_and_resume(forker, whole, "random", kills) == 3


def test_killed_during_saves(forker, whole):
    rng = random.Random(1)

    def during_save(delay, skip):
        seen = set()

        def condition(output):
            seen.update(path.name for path in output.glob(".step_*.tmp"))
            if len(seen) <= skip:
                return False
            time.sleep(delay)
            return True

        return condition

    kills = [during_save(rng.uniform(0, 0.03), rng.randint(1, 2)) for _ in range(4)]
    assert kill_and_resume(forker, whole, "saves", kills) >= 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_saves_and_says_how_to_go_on(forker, whole, number):
    name, folder, expected = whole
    output_dir = folder / f"stopped_{number.name}"
    config = write_config(name, folder, output_dir, **{**SETTINGS, "save_every_n_steps": 1000, "log_level": "WARNING"})
    (pid,) = forker.start(name, config)
    assert killing.wait_for(lambda: steps_logged(output_dir) >= 5, [pid]), said(config)
    os.kill(pid, number)
    assert forker.wait() == [{signal.SIGTERM: 75, signal.SIGINT: 130}[number]], said(config)
    assert "resume_from_checkpoint=True" in said(config)
    (saved,) = output_dir.glob("step_*")
    assert int(saved.name.split("_")[1]) == max(losses(output_dir)) < STEPS
    assert forker.run(name, config, "resume_from_checkpoint=True") == 0, said(config)
    assert losses(output_dir) == expected


@pytest.fixture(scope="module", params=SEVERAL[:1])
def whole_on_two(request, forker, tmp_path_factory):
    """An uninterrupted run on two ranks: recipe, folder of its inputs, losses."""
    folder = tmp_path_factory.mktemp("two")
    expected = killing.uninterrupted(forker, request.param, folder, ranks=2)
    assert list(expected) == list(range(1, STEPS // 2 + 1))
    return request.param, folder, expected


@pytest.mark.slow
def test_ranks_that_are_killed(forker, whole_on_two):
    """After some steps, in a save, as it is renamed; one or all. ``tests/recipes/killing.py`` does it more often."""
    name, folder, expected = whole_on_two
    ended = killing.kill_and_resume(forker, name, folder, expected, kills=3, seed=SEVERAL.index(name))
    assert ended.total() == 3


RETRIEVAL = [
    {"query": f"where {word}", "positive": f"the {word} sees", "negatives": [f"a {word} finds"] * (1 + number % 2)}
    for number, word in enumerate(WORDS[:16])
]
EMBEDDING = {
    "dataset": {"_component_": "torchtune.datasets.embedding_dataset", "source": RETRIEVAL},
    "collate_fn": "torchtune.data.collate_embedding",
    # Ranks gather the passages of both, in parts of which each is computed twice.
    "loss": {"_component_": "torchtune.rlhf.loss.InfoNCELoss", "texts_per_pass": 3},
}
RERANKER = {
    "dataset": {"_component_": "torchtune.datasets.reranking_dataset", "source": RETRIEVAL, "listwise": True},
    "collate_fn": "torchtune.data.collate_reranking",
    "loss": {"_component_": "torchtune.rlhf.loss.RerankListwiseLoss"},
}


@pytest.mark.slow
def test_ranks_that_gather_passages_are_killed(forker, tmp_path):
    name = "full_dpo_distributed"
    settings = {**EMBEDDING, "epochs": 2}
    expected = killing.uninterrupted(forker, name, tmp_path, ranks=2, **settings)
    assert list(expected) == list(range(1, 9))
    assert killing.kill_and_resume(forker, name, tmp_path, expected, kills=1, seed=0, **settings).total() == 1


def test_killed_reranker_goes_on(forker, tmp_path):
    model = {
        "_component_": "torchtune.modules.classifier_model",
        "num_classes": 1,
        "base_model_path": "torchtune.models.from_hf_config",
        "checkpoint_dir": str(tmp_path / "checkpoint"),
    }
    settings = {**SETTINGS, **RERANKER, "model": model, "epochs": 1}
    name = "full_dpo_single_device"
    config = write_config(name, tmp_path, tmp_path / "whole", **settings)
    assert forker.run(name, config) == 0, said(config)
    config = write_config(name, tmp_path, tmp_path / "killed", **settings)
    code = forker.run(name, config, kill_when=lambda: steps_logged(tmp_path / "killed") >= 5)
    assert code == -signal.SIGKILL, said(config)
    assert forker.run(name, config, "resume_from_checkpoint=True") == 0, said(config)
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "whole")) == 8
