"""What every training recipe promises, as functions that raise ``AssertionError`` when a promise is broken.

``test_contract.py`` runs them on the recipes as they are; ``test_historical_bugs.py`` runs each of them on a recipe or
library with a bug put in, and expects it to raise.
"""

import shutil
from pathlib import Path
from typing import Any

import torch

from tests.recipes.runs import Run, start
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX

# One step of plain SGD at rate 1 leaves the gradient in the weights.
GRADIENT = {
    "optimizer": {"_component_": "torch.optim.SGD", "lr": 1.0},
    "lr_scheduler": None,
    "max_steps_per_epoch": 1,
    "shuffle": False,
}


def same(one: Run, other: Run, *, loss: float = 1e-6, weights: float = 1e-5) -> None:
    """Both runs logged the same losses and ended with the same weights."""
    assert one.losses.keys() == other.losses.keys()
    for step in one.losses:
        assert abs(one.losses[step] - other.losses[step]) <= loss, f"loss of step {step}"
    for name, value in one.trained.items():
        torch.testing.assert_close(other.trained[name], value, atol=weights, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def loss_is_independent_of(name: str, folder: Path, one: dict[str, Any], other: dict[str, Any], **run: Any) -> None:
    """Two ways to split the same work give the same loss and, after a step of SGD, the same weights."""
    same(start(name, folder, **GRADIENT, **one, **run), start(name, folder, **GRADIENT, **other, **run))


def accumulation_changes_nothing(name: str, folder: Path, **run: Any) -> None:
    """8 examples at once, in 2, in 4 or in 8 micro-batches of different label counts."""
    whole = {"batch_size": 8, "gradient_accumulation_steps": 1}
    for batch_size, steps in ((4, 2), (2, 4), (1, 8)):
        split = {"batch_size": batch_size, "gradient_accumulation_steps": steps}
        loss_is_independent_of(name, folder, whole, split, **run)


def packing_changes_nothing(name: str, folder: Path, **run: Any) -> None:
    """The whole data set as padded rows, as unpadded rows and as packs."""
    padded = {"batch_size": 24, "collate_fn": "torchtune.data.padded_collate_sft"}
    unpadded = {"batch_size": 24}
    packed = {"batch_size": 100, "dataset__packed": True}
    loss_is_independent_of(name, folder, padded, unpadded, **run)
    loss_is_independent_of(name, folder, padded, packed, **run)


def setting_changes_nothing(name: str, folder: Path, settings: dict[str, Any], **run: Any) -> None:
    """A switch that saves memory or time leaves loss and gradients as they are."""
    loss_is_independent_of(name, folder, {"batch_size": 4}, {"batch_size": 4, **settings}, **run)


def documents_restart_positions(name: str, folder: Path, **run: Any) -> None:
    """In every batch the positions of a document count from 0."""
    recipe = start(name, folder, train=False, dataset__packed=True, **run).recipe
    for batches in recipe.loader:
        for batch in batches:
            expected = torch.cat([torch.arange(length) for length in batch["documents"].lengths])
            torch.testing.assert_close(batch["input_pos"].flatten(), expected)
            assert len(batch["documents"].lengths) > 1


def end_of_turn_is_trained(name: str, folder: Path, **run: Any) -> None:
    """Every assistant turn has its end token among the labels, once."""
    recipe = start(name, folder, train=False, shuffle=False, **run).recipe
    stop = recipe.tokenizer.stop_tokens[0]
    lines = (folder / "data.jsonl").read_text().splitlines()
    turns = sum(line.count('"role": "assistant"') for line in lines)
    labels = torch.cat([batch["labels"].flatten() for batches in recipe.loader for batch in batches])
    assert int((labels == stop).sum()) == turns


def loss_equals_transformers(name: str, folder: Path, **run: Any) -> None:
    """The first loss is the one that ``transformers`` computes for the same labels, shifted once."""
    from transformers import AutoModelForCausalLM

    run_ = start(name, folder, batch_size=24, **GRADIENT, **run)
    model = AutoModelForCausalLM.from_pretrained(folder / "checkpoint", dtype=torch.float32)
    dataset = start(name, folder, train=False).recipe.loader.dataset
    total, count = 0.0, 0
    for index in range(len(dataset)):
        tokens, labels = (torch.as_tensor(dataset[index][key]) for key in ("tokens", "labels"))
        unshifted = torch.cat([torch.tensor([CROSS_ENTROPY_IGNORE_IDX]), labels[:-1]])
        trained = int((unshifted != CROSS_ENTROPY_IGNORE_IDX).sum())
        with torch.no_grad():
            loss = model(input_ids=tokens[None], labels=unshifted[None]).loss
        total, count = total + loss.item() * trained, count + trained
    assert abs(run_.losses[1] - total / count) <= 1e-5


def resume_equals_uninterrupted(name: str, folder: Path, **run: Any) -> None:
    """Stopped after any save and resumed, the rest of the run is the same, bit for bit."""
    settings = {"save_every_n_steps": 1, "epochs": 2, "gradient_accumulation_steps": 2, **run}
    if name.startswith("lora"):
        converter = {"_component_": "torchtune.modules.peft.LoRA", "rank": 4, "alpha": 8, "dropout": 0.2}
        settings["model_converters"] = [converter]
    whole = start(name, folder, **settings)
    assert len(whole.losses) == 12
    for step in (2, 6, 11):  # inside an epoch, at its end, one before the last step
        output_dir = folder / f"resumed_{step}_{whole.output_dir.name}"
        output_dir.mkdir()
        shutil.copytree(whole.output_dir / f"step_{step}", output_dir / f"step_{step}")
        (output_dir / "logs").mkdir()
        resumed = start(name, folder, **settings, output_dir=output_dir, resume_from_checkpoint=True)
        expected = range(step + 1, 13)
        assert resumed.losses == {s: whole.losses[s] for s in expected}, f"losses after resuming at step {step}"
        assert resumed.lrs == {s: whole.lrs[s] for s in expected}, f"learning rates after resuming at step {step}"
        for key, value in whole.trained.items():
            assert torch.equal(value, resumed.trained[key]), key


def export_equals_trained(name: str, folder: Path, **run: Any) -> None:
    """What was saved, loaded by ``transformers``, computes what the trained model computes."""
    from transformers import AutoModelForCausalLM

    trained = start(name, folder, **run)
    (saved,) = [path for path in trained.output_dir.iterdir() if path.name.startswith("epoch_")]
    model = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    tokens = torch.arange(3, 40)[None]
    trained.recipe.model.eval()
    trained.recipe.model.skip_output_layer = False
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, trained.recipe.model(tokens), atol=1e-4, rtol=0)
