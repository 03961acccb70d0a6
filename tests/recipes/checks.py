"""Promises of training recipes that several files test."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.recipes.runs import ADAPTERS, Run, resume, start

# One step of plain SGD at rate 1 leaves the gradient in the weights.
GRADIENT = {
    "optimizer": {"_component_": "torch.optim.SGD", "lr": 1.0},
    "lr_scheduler": None,
    "max_steps_per_epoch": 1,
    "shuffle": False,
}


def same(first: Run, second: Run, *, loss: float = 1e-6, weights: float = 1e-5) -> None:
    """Both runs logged the same losses and ended with the same weights."""
    assert first.losses == pytest.approx(second.losses, abs=loss, rel=0)
    assert first.trained.keys() == second.trained.keys()
    for name, value in first.trained.items():
        torch.testing.assert_close(second.trained[name], value, atol=weights, rtol=0, msg=name)


def split_changes_nothing(name: str, folder: Path, settings: dict[str, Any], *other_settings: dict[str, Any]) -> None:
    """Other ways to split the same work, or to save memory, give the same loss and, after a step, the same weights."""
    run = start(name, folder, **GRADIENT, **settings)
    for changed_settings in other_settings:
        same(run, start(name, folder, **GRADIENT, **changed_settings))


def accumulation_changes_nothing(name: str, folder: Path) -> None:
    """8 examples at once, in 2, in 4 or in 8 micro-batches of different label counts."""
    splits = [{"batch_size": 8 // steps, "gradient_accumulation_steps": steps} for steps in (1, 2, 4, 8)]
    split_changes_nothing(name, folder, *splits)


def packing_changes_nothing(name: str, folder: Path) -> None:
    """The whole data set as padded rows, as unpadded rows and as packs."""
    padded = {"batch_size": 24, "collate_fn": "torchtune.data.padded_collate_sft"}
    split_changes_nothing(name, folder, padded, {"batch_size": 24}, {"batch_size": 100, "dataset__packed": True})


def resume_equals_uninterrupted(name: str, folder: Path, **run: Any) -> Run:
    """Stopped after any save and resumed, the rest of the run is the same, bit for bit; returns the whole run."""
    settings = {"save_every_n_steps": 1, "checkpointer__keep_last_n_checkpoints": 20}
    settings |= {"epochs": 2, "gradient_accumulation_steps": 2, **run}
    if name in ADAPTERS:
        converter = {"_component_": "torchtune.modules.peft.LoRA", "rank": 4, "alpha": 8, "dropout": 0.2}
        settings["model_converters"] = [converter]
    full_run = start(name, folder, **settings)
    assert len(full_run.losses) == 12, "two epochs have twelve steps"
    for step in (2, 6, 11):  # inside an epoch, at its end, one before the last step
        resume(name, folder, full_run, step, **settings)
    return full_run
