"""Recipes take a batch, a dict of a user's own collation, and code that was written for dicts."""

import pytest
import torch

from tests.recipes.runs import TRAINING, start
from torchtune.config import ConfigError, to_yaml
from torchtune.data import DataError, padded_collate_packed

# compute_loss and label count of a recipe that was copied when batches were dicts.
FOR_DICTS = {
    "        batch = batch.to(self.device, non_blocking=True)\n": (
        "        utils.batch_to_device(batch, self.device)\n        labels = batch.pop('labels')\n"
    ),
    "self.model(**batch.model_inputs(), output": "self.model(**batch, output",
    "                hidden,\n                batch.labels,\n": "                hidden,\n                labels,\n",
    'means.add({"loss": (self.compute_loss(batch), batch.num_terms)})': (
        "count = int((batch['labels'] != -100).sum())\n"
        "                means.add({'loss': (self.compute_loss(batch), count)})"
    ),
}


def own_collate(examples):
    batch = padded_collate_packed([[example] for example in examples])
    return {**batch, "weights": torch.ones(batch["tokens"].shape), "mask": None}


def collate_with_rewards(examples):
    return {**own_collate(examples), "rewards": torch.ones(len(examples))}


@pytest.mark.parametrize("name", TRAINING)
def test_a_copied_recipe_reads_batches_as_dicts(name, tmp_path):
    settings = {"max_steps_per_epoch": 3, "run_val_every_n_steps": 3}
    settings["dataset_val"] = "${dataset}"
    run, copied = (start(name, tmp_path, changes=changes, **settings) for changes in (None, FOR_DICTS))
    assert run.losses == copied.losses
    assert [record["val_loss"] for record in run.records if "val_loss" in record] == [
        record["val_loss"] for record in copied.records if "val_loss" in record
    ]


def test_dict_of_a_users_collate_fn_trains_as_the_default_batch(tmp_path):
    name = "full_finetune_single_device"
    settings = {"max_steps_per_epoch": 3, "batch_size": 4}
    run = start(name, tmp_path, **settings)
    collated_run = start(name, tmp_path, collate_fn=f"{__name__}.own_collate", **settings)
    assert collated_run.losses == pytest.approx(run.losses, abs=1e-5)  # padded rows add up in another order
    with pytest.raises(DataError, match=r"collate_fn: 'rewards' \(shape \(4,\)\) is not per token"):
        start(name, tmp_path, collate_fn=f"{__name__}.collate_with_rewards", **settings)


def test_collation_in_the_recipes_file_needs_no_module(tmp_path):
    functions = """
def short_collate(examples):
    return padded_collate_sft([{name: example[name][:4] for name in ("tokens", "labels")} for example in examples])


@config.parse
"""
    imports = "from torchtune.data import Batch, BatchLoader"
    changes = {"@config.parse\n": functions, f"{imports}\n": f"{imports}, padded_collate_sft\n"}
    name = "full_finetune_single_device"
    settings = {"train": False, "changes": changes, "batch_size": 2}
    run = start(name, tmp_path, collate_fn="short_collate", **settings)
    (batch,) = next(iter(run.recipe.loader))
    assert batch.tokens.shape == (2, 4)
    assert "collate_fn: short_collate\n" in to_yaml(run.recipe.cfg)
    with pytest.raises(ConfigError, match=r"there is no 'short_colate' in the recipe's file.*'short_collate'"):
        start(name, tmp_path, collate_fn="short_colate", **settings)
