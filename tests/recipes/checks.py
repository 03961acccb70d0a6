"""What every training recipe promises, as functions that raise :class:`Broken` when a promise is broken.

``test_contract.py`` runs them on the recipes as they are; ``test_injected_bugs.py`` runs them on a recipe or library
with a bug put in, and expects :class:`Broken` with the sentence of the promise. Nothing else raises it: an error of the
harness, an ``AssertionError`` among them, is never taken for a caught bug.
"""

import math
import shutil
from pathlib import Path
from typing import Any

import torch

from tests.recipes.runs import ADAPTERS, Run, start
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX

# One step of plain SGD at rate 1 leaves the gradient in the weights.
GRADIENT = {
    "optimizer": {"_component_": "torch.optim.SGD", "lr": 1.0},
    "lr_scheduler": None,
    "max_steps_per_epoch": 1,
    "shuffle": False,
}


class Broken(Exception):
    """A promise of the contract is broken; the message is the promise."""


def promise(kept: bool, sentence: str) -> None:
    """Raise :class:`Broken` with ``sentence`` unless it is kept."""
    if not kept:
        raise Broken(sentence)


def is_close(one: torch.Tensor, other: torch.Tensor, atol: float) -> bool:
    """Whether two tensors of one shape differ by at most ``atol``."""
    return one.shape == other.shape and torch.allclose(one, other, atol=atol, rtol=0)


def same(one: Run, other: Run, *, loss: float = 1e-6, weights: float = 1e-5) -> None:
    """Both runs logged the same losses and ended with the same weights."""
    promise(one.losses.keys() == other.losses.keys(), "both runs log the same steps")
    for step in one.losses:
        promise(abs(one.losses[step] - other.losses[step]) <= loss, f"the loss of step {step} is the same")
    promise(one.trained.keys() == other.trained.keys(), "both runs train the same parameters")
    for name, value in one.trained.items():
        promise(is_close(other.trained[name], value, weights), f"the trained {name} is the same")


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
    packs = [batch for batches in recipe.loader for batch in batches]
    promise(len(packs) > 1 and any(len(pack["documents"].lengths) > 1 for pack in packs), "packs hold documents")
    for pack in packs:
        expected = torch.cat([torch.arange(length) for length in pack["documents"].lengths])
        promise(torch.equal(pack["input_pos"].flatten(), expected), "positions restart with every document")


def end_of_turn_is_trained(name: str, folder: Path, **run: Any) -> None:
    """Every assistant turn has its end token among the labels, once."""
    recipe = start(name, folder, train=False, shuffle=False, **run).recipe
    stop = recipe.tokenizer.stop_tokens[0]
    lines = (folder / "data.jsonl").read_text().splitlines()
    turns = sum(line.count('"role": "assistant"') for line in lines)
    labels = torch.cat([batch["labels"].flatten() for batches in recipe.loader for batch in batches])
    promise(0 < turns == int((labels == stop).sum()), "every assistant turn has its end among the labels, once")


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
    promise(abs(run_.losses[1] - total / count) <= 1e-5, "the first loss is that of transformers")


def resume_equals_uninterrupted(name: str, folder: Path, **run: Any) -> None:
    """Stopped after any save and resumed, the rest of the run is the same, bit for bit."""
    settings = {"save_every_n_steps": 1, "checkpointer__keep_last_n_checkpoints": 20}
    settings |= {"epochs": 2, "gradient_accumulation_steps": 2, **run}
    if name in ADAPTERS:
        converter = {"_component_": "torchtune.modules.peft.LoRA", "rank": 4, "alpha": 8, "dropout": 0.2}
        settings["model_converters"] = [converter]
    whole = start(name, folder, **settings)
    promise(len(whole.losses) == 12, "two epochs have twelve steps")
    for step in (2, 6, 11):  # inside an epoch, at its end, one before the last step
        output_dir = folder / f"resumed_{step}_{whole.output_dir.name}"
        output_dir.mkdir()
        shutil.copytree(whole.output_dir / f"step_{step}", output_dir / f"step_{step}")
        (output_dir / "logs").mkdir()
        resumed = start(name, folder, **settings, output_dir=output_dir, resume_from_checkpoint=True)
        expected = range(step + 1, 13)
        promise(list(resumed.losses) == list(expected), f"the steps after step {step} are run, each once")
        promise(resumed.lrs == {s: whole.lrs[s] for s in expected}, f"learning rates go on after step {step}")
        promise(resumed.losses == {s: whole.losses[s] for s in expected}, f"losses go on after step {step}")
        for key, value in whole.trained.items():
            promise(torch.equal(value, resumed.trained[key]), f"after step {step}, {key} is trained to the same bits")


def export_equals_trained(name: str, folder: Path, **run: Any) -> None:
    """What was saved, loaded by ``transformers``, computes what the trained model computes."""
    from transformers import AutoModelForCausalLM

    trained = start(name, folder, **run)
    (saved,) = trained.output_dir.glob("epoch_*")
    model = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    tokens = torch.arange(3, 40)[None]
    trained.recipe.model.eval()
    trained.recipe.model.skip_output_layer = False
    with torch.no_grad():
        ours, theirs = trained.recipe.model(tokens), model(tokens).logits
    promise(is_close(theirs, ours, 1e-4), "what was saved computes what was trained")


def losses_follow_plain_torch(name: str, folder: Path, **run: Any) -> None:
    """Three clipped steps of SGD log the losses of a loop over ``transformers``' model, and its gradient norms."""
    from transformers import AutoModelForCausalLM

    settings = {**GRADIENT, "max_steps_per_epoch": 3, "batch_size": 2, "gradient_accumulation_steps": 2}
    settings |= {"optimizer": {"_component_": "torch.optim.SGD", "lr": 0.3}, "clip_grad_norm": 0.5, **run}
    ours = start(name, folder, **settings)
    model = AutoModelForCausalLM.from_pretrained(folder / "checkpoint", dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    rows = ours.recipe.loader.dataset
    for step in range(3):
        total = torch.zeros(())
        for row in (rows[index] for index in range(4 * step, 4 * step + 4)):
            logits = model(torch.as_tensor(row["tokens"])[None]).logits[0]
            total = total + torch.nn.functional.cross_entropy(logits, torch.as_tensor(row["labels"]), reduction="sum")
        labels = sum(
            int((torch.as_tensor(rows[4 * step + i]["labels"]) != CROSS_ENTROPY_IGNORE_IDX).sum()) for i in range(4)
        )
        (total / labels).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        record = ours.records[step]
        promise(
            abs(record["loss"] - total.item() / labels) <= 1e-4, f"the loss of step {step + 1} is that of plain torch"
        )
        promise(abs(record["grad_norm"] - norm.item()) <= 1e-3, f"the norm of step {step + 1} is that of plain torch")


def training_learns(name: str, folder: Path, **run: Any) -> None:
    """Six epochs take more than a nat off the loss."""
    losses = start(name, folder, epochs=6, batch_size=8, **run).losses
    promise(losses[max(losses)] < losses[1] - 1.0, "six epochs lower the loss by more than 1")


def validation_is_the_mean_over_labels(name: str, folder: Path, **run: Any) -> None:
    """Batches of different label counts give the validation loss of the whole data set at once."""
    settings = {"optimizer": {"_component_": "torch.optim.SGD", "lr": 0.0}, "lr_scheduler": None, "shuffle": False}
    whole = start(name, folder, **settings, batch_size=24, max_steps_per_epoch=1)
    data = {
        "_component_": "torchtune.datasets.chat_dataset",
        "source": "json",
        "data_files": str(folder / "data.jsonl"),
        "conversation_column": "messages",
        "conversation_style": "openai",
    }
    settings |= {"dataset_val": data, "batch_size_val": 5, "run_val_every_n_steps": 6}
    validated = {r["step"]: r["val_loss"] for r in start(name, folder, **settings, **run).records if "val_loss" in r}
    promise(list(validated) == [6, 12], "validation runs when it is due")
    promise(abs(validated[6] - whole.losses[1]) <= 1e-6, "the validation loss is the mean over all labels")


def validation_leaves_training_alone(name: str, folder: Path, **run: Any) -> None:
    """A run that validates logs the losses of one that does not, dropout included."""
    converter = {"_component_": "torchtune.modules.peft.LoRA", "rank": 4, "alpha": 8, "dropout": 0.3}
    settings = {"max_steps_per_epoch": 4, "model_converters": [converter] if name in ADAPTERS else [], **run}
    plain = start(name, folder, **settings)
    data = plain.recipe.cfg.dataset
    validating = start(name, folder, **settings, dataset_val=dict(data), run_val_every_n_steps=1)
    promise(plain.losses == validating.losses, "validation changes no loss")


def schedule_runs_over_all_epochs(name: str, folder: Path, **run: Any) -> None:
    """Two epochs of six steps: the rate warms up for two steps, and falls along a cosine to the last one."""
    lrs = start(name, folder, epochs=2, batch_size=4, **run).lrs
    expected = [0.01 / 3, 0.02 / 3, *(0.005 * (1 + math.cos(math.pi * step / 10)) for step in range(10))]
    promise(list(lrs) == list(range(1, 13)), "every step logs its learning rate")
    close = all(abs(lrs[step] - rate) <= 1e-9 for step, rate in enumerate(expected, start=1))
    promise(close, "the learning rate follows the schedule over all epochs")
