"""Promises of training recipes that several files test."""

import shutil
from pathlib import Path
from typing import Any

import torch

from tests.recipes.runs import ADAPTERS, Run, start

# One step of plain SGD at rate 1 leaves the gradient in the weights.
GRADIENT = {
    "optimizer": {"_component_": "torch.optim.SGD", "lr": 1.0},
    "lr_scheduler": None,
    "max_steps_per_epoch": 1,
    "shuffle": False,
}


def is_close(one: torch.Tensor, other: torch.Tensor, atol: float) -> bool:
    """Whether two tensors of one shape differ by at most ``atol``."""
    return one.shape == other.shape and torch.allclose(one, other, atol=atol, rtol=0)


def same(one: Run, other: Run, *, loss: float = 1e-6, weights: float = 1e-5) -> None:
    """Both runs logged the same losses and ended with the same weights."""
    assert one.losses.keys() == other.losses.keys(), "both runs log the same steps"
    for step in one.losses:
        assert abs(one.losses[step] - other.losses[step]) <= loss, f"the loss of step {step} is the same"
    assert one.trained.keys() == other.trained.keys(), "both runs train the same parameters"
    for name, value in one.trained.items():
        assert is_close(other.trained[name], value, weights), f"the trained {name} is the same"


def split_changes_nothing(name: str, folder: Path, whole: dict[str, Any], *others: dict[str, Any]) -> None:
    """Other ways to split the same work give the same loss and, after a step of SGD, the same weights."""
    run = start(name, folder, **GRADIENT, **whole)
    for other in others:
        same(run, start(name, folder, **GRADIENT, **other))


def accumulation_changes_nothing(name: str, folder: Path) -> None:
    """8 examples at once, in 2, in 4 or in 8 micro-batches of different label counts."""
    splits = [{"batch_size": 8 // steps, "gradient_accumulation_steps": steps} for steps in (1, 2, 4, 8)]
    split_changes_nothing(name, folder, *splits)


def packing_changes_nothing(name: str, folder: Path) -> None:
    """The whole data set as padded rows, as unpadded rows and as packs."""
    padded = {"batch_size": 24, "collate_fn": "torchtune.data.padded_collate_sft"}
    split_changes_nothing(name, folder, padded, {"batch_size": 24}, {"batch_size": 100, "dataset__packed": True})


def setting_changes_nothing(name: str, folder: Path, settings: dict[str, Any]) -> None:
    """A switch that saves memory or time leaves loss and gradients as they are."""
    split_changes_nothing(name, folder, {"batch_size": 4}, {"batch_size": 4, **settings})


def resume_equals_uninterrupted(name: str, folder: Path, **run: Any) -> None:
    """Stopped after any save and resumed, the rest of the run is the same, bit for bit."""
    settings = {"save_every_n_steps": 1, "checkpointer__keep_last_n_checkpoints": 20}
    settings |= {"epochs": 2, "gradient_accumulation_steps": 2, **run}
    if name in ADAPTERS:
        converter = {"_component_": "torchtune.modules.peft.LoRA", "rank": 4, "alpha": 8, "dropout": 0.2}
        settings["model_converters"] = [converter]
    whole = start(name, folder, **settings)
    assert len(whole.losses) == 12, "two epochs have twelve steps"
    for step in (2, 6, 11):  # inside an epoch, at its end, one before the last step
        output_dir = folder / f"resumed_{step}_{whole.output_dir.name}"
        output_dir.mkdir()
        shutil.copytree(whole.output_dir / f"step_{step}", output_dir / f"step_{step}")
        (output_dir / "logs").mkdir()
        resumed = start(name, folder, **settings, output_dir=output_dir, resume_from_checkpoint=True)
        expected = range(step + 1, 13)
        assert list(resumed.losses) == list(expected), f"the steps after step {step} are run, each once"
        assert resumed.lrs == {s: whole.lrs[s] for s in expected}, f"learning rates go on after step {step}"
        assert resumed.losses == {s: whole.losses[s] for s in expected}, f"losses go on after step {step}"
        for key, value in whole.trained.items():
            assert torch.equal(value, resumed.trained[key]), f"after step {step}, {key} is trained to the same bits"
