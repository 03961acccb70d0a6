"""A run on a mixture: losses by dataset, and a resume that is the run."""

import pytest

from tests.recipes.runs import load_recipe, resume, start, write_config
from tests.tiny import CHATS, write_conversations
from torchtune.config import load_and_check
from torchtune.data import DataError
from torchtune.estimate import plan_data

NAME = "full_finetune_single_device"


@pytest.fixture
def parts(tmp_path):
    counts = {"many": 16, "few": 5}
    paths = {name: write_conversations(tmp_path / f"{name}.jsonl", count=count) for name, count in counts.items()}
    return {name: {**CHATS, "source": str(path)} for name, path in paths.items()}


def mixed(parts, **how):
    return {"_component_": "torchtune.datasets.mixed_dataset", "datasets": parts, **how}


def test_a_mixture_is_trained_on_and_resumed(parts, tmp_path):
    settings = {
        "dataset": mixed(parts, weights={"many": 1, "few": 1}),
        "dataset_val": mixed(parts, stop="all"),
        "run_val_every_n_steps": 4,
        "save_every_n_steps": 3,
        "gradient_accumulation_steps": 2,
        "checkpointer__keep_last_n_checkpoints": 9,
    }
    full_run = start(NAME, tmp_path, **settings)
    assert list(full_run.losses) == list(range(1, 9))  # 16 of each, 4 a step
    resumed = resume(NAME, tmp_path, full_run, 3, **settings)
    names = ("loss", "loss/many", "loss/few", "val_loss", "val_loss/many", "val_loss/few")

    def figures(run):
        rows = []
        for record in run.records:
            rows.append({name: record.get(name) for name in names})
        return rows

    assert len(resumed.records) == 7
    assert figures(full_run)[-7:] == figures(resumed)
    for record in (record for record in full_run.records if "val_loss" in record):  # the whole is between its parts
        low, high = sorted([record["val_loss/many"], record["val_loss/few"]])
        assert low <= record["val_loss"] <= high


def test_streams_are_trained_on_and_resumed(parts, tmp_path):
    parts["many"] |= {"streaming": True, "shuffle_buffer": 6}
    settings = {
        "dataset": mixed(
            {name: {**part, "packed": True} for name, part in parts.items()}, weights={"many": 3, "few": 1}
        ),
        "save_every_n_steps": 3,
        "max_steps_per_epoch": 4,
        "epochs": 2,
        "checkpointer__keep_last_n_checkpoints": 9,
    }
    full_run = start(NAME, tmp_path, **settings)

    def losses(run):
        return [(record["loss"], record.get("loss/many")) for record in run.records]

    assert len(full_run.records) == 8
    for step in (3, 6):  # within an epoch, and after the first has ended
        resumed = resume(NAME, tmp_path, full_run, step, **settings)
        assert losses(resumed) == losses(full_run)[step:]


def test_the_steps_of_mixtures_and_streams_are_known_before_a_run(parts, tmp_path):
    def planned(**settings):
        module = load_recipe(NAME, tmp_path)
        path = write_config(NAME, tmp_path, tmp_path / "out", epochs=2, **settings)
        return dict(plan_data(load_and_check(path, [], module.recipe_main)))

    dataset = mixed(parts, weights={"many": 1, "few": 1})
    assert planned(dataset=dataset)["steps"].startswith("32 = 2 epochs of 16")
    assert "mixed: 32 rows per epoch" in planned(dataset=dataset)["data"]
    parts["many"]["streaming"] = True
    assert planned(dataset=dataset, max_steps_per_epoch=4)["steps"].startswith("8 = 2 epochs of 4")
    with pytest.raises(DataError, match="set max_steps_per_epoch"):
        planned(dataset=dataset)
