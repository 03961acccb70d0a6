"""A run on a mixture: losses by dataset, and a resume that is the run."""

import shutil
from typing import Any

import pytest
import torch

from tests.recipes.runs import load_recipe, start, write_config
from tests.tiny import write_conversations
from torchtune.config import load_and_check
from torchtune.data import DataError
from torchtune.estimate._plan_data import plan_data


def test_a_mixture_is_trained_on_and_resumed(tmp_path):
    chats = {"_component_": "torchtune.datasets.chat_dataset", "conversation_column": "messages"}
    chats["conversation_style"] = "openai"
    for name, count in (("many", 16), ("few", 5)):
        write_conversations(tmp_path / f"{name}.jsonl", count=count)
    parts = {name: {**chats, "source": str(tmp_path / f"{name}.jsonl")} for name in ("many", "few")}
    mixed = {"_component_": "torchtune.datasets.mixed_dataset", "datasets": parts}
    settings = {
        "dataset": {**mixed, "weights": {"many": 1, "few": 1}},
        "dataset_val": {**mixed, "stop": "all"},
        "run_val_every_n_steps": 4,
        "save_every_n_steps": 3,
        "gradient_accumulation_steps": 2,
        "checkpointer__keep_last_n_checkpoints": 9,
    }
    whole = start("full_finetune_single_device", tmp_path, **settings)
    assert list(whole.losses) == list(range(1, 9))  # 16 of each, 4 a step
    resumed_dir = tmp_path / "resumed"
    shutil.copytree(whole.output_dir / "step_3", resumed_dir / "step_3")
    (resumed_dir / "logs").mkdir()
    resumed = start(
        "full_finetune_single_device", tmp_path, **settings, output_dir=resumed_dir, resume_from_checkpoint=True
    )
    names = ("loss", "loss/many", "loss/few", "val_loss", "val_loss/many", "val_loss/few")
    told = [[{name: record.get(name) for name in names} for record in run.records] for run in (whole, resumed)]
    assert told[0][-len(told[1]) :] == told[1]
    assert len(told[1]) == 7
    for key, value in whole.trained.items():
        assert torch.equal(value, resumed.trained[key]), key
    validation = [record for record in whole.records if "val_loss" in record]
    for record in validation:  # the whole is between its parts
        parts_of = sorted([record["val_loss/many"], record["val_loss/few"]])
        assert parts_of[0] <= record["val_loss"] <= parts_of[1]
        assert record["val_loss"] == pytest.approx(sum(parts_of) / 2, abs=parts_of[1] - parts_of[0])


def test_streams_are_trained_on_and_resumed(tmp_path):
    parts = {}
    for name, count in (("many", 16), ("few", 5)):
        source = str(write_conversations(tmp_path / f"{name}.jsonl", count=count))
        parts[name] = {"_component_": "torchtune.datasets.chat_dataset", "source": source, "packed": True}
        parts[name] |= {"conversation_column": "messages", "conversation_style": "openai"}
    parts["many"] |= {"streaming": True, "shuffle_buffer": 6}
    settings = {
        "dataset": {
            "_component_": "torchtune.datasets.mixed_dataset",
            "datasets": parts,
            "weights": {"many": 3, "few": 1},
        },
        "save_every_n_steps": 3,
        "max_steps_per_epoch": 4,
        "epochs": 2,
        "checkpointer__keep_last_n_checkpoints": 9,
    }
    whole = start("full_finetune_single_device", tmp_path, **settings)
    for step in (3, 6):  # within an epoch, and after the first has ended
        resumed_dir = tmp_path / f"resumed_{step}"
        shutil.copytree(whole.output_dir / f"step_{step}", resumed_dir / f"step_{step}")
        (resumed_dir / "logs").mkdir()
        resumed = start(
            "full_finetune_single_device", tmp_path, **settings, output_dir=resumed_dir, resume_from_checkpoint=True
        )
        told = [[(record["loss"], record.get("loss/many")) for record in run.records] for run in (whole, resumed)]
        assert told[0][step:] == told[1]
        assert len(told[0]) == 8
        for key, value in whole.trained.items():
            assert torch.equal(value, resumed.trained[key]), key


def test_the_steps_of_mixtures_and_streams_are_known_before_a_run(tmp_path):
    def planned(**settings: Any) -> dict[str, str]:
        module = load_recipe("full_finetune_single_device", tmp_path)
        path = write_config("full_finetune_single_device", tmp_path, tmp_path / "out", epochs=2, **settings)
        return dict(plan_data(load_and_check(path, [], module.recipe_main)))

    chats = {"_component_": "torchtune.datasets.chat_dataset", "conversation_column": "messages"}
    chats["conversation_style"] = "openai"
    parts = {}
    for name, count in (("many", 16), ("few", 5)):
        parts[name] = {**chats, "source": str(write_conversations(tmp_path / f"{name}.jsonl", count=count))}
    mixed = {
        "_component_": "torchtune.datasets.mixed_dataset",
        "datasets": parts,
        "weights": {"many": 1, "few": 1},
    }
    assert planned(dataset=mixed)["steps"].startswith("32 = 2 epochs of 16")
    assert "mixed: 32 rows per epoch" in planned(dataset=mixed)["data"]
    parts["many"]["streaming"] = True
    assert planned(dataset=mixed, max_steps_per_epoch=4)["steps"].startswith("8 = 2 epochs of 4")
    with pytest.raises(DataError, match="set max_steps_per_epoch"):
        planned(dataset=mixed)
