"""The recipes with a model of text and images."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import MllamaForConditionalGeneration

from tests import tiny_vision
from tests.recipes.killing import Forker
from tests.recipes.runs import Run, start, write_config
from tests.recipes.test_distributed import close, fork, losses
from tests.tiny_vision import images, logits_of_transformers, sees

SETTINGS = {
    "dataset": {"_component_": "tests.tiny_vision.Rows"},
    "collate_fn": "torchtune.data.padded_collate_tiled_images_and_mask",
    "lr_scheduler": None,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_vision.write_vision_checkpoint(tmp_path / "checkpoint")
    return tmp_path


def run(kind: str, folder: Path, **settings: Any) -> Run:
    return start(f"{kind}_finetune_single_device", folder, **{**SETTINGS, "batch_size": 3, **settings})


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_training_resumes_to_the_bit_and_transformers_reads_what_comes_out(kind: str, folder: Path) -> None:
    settings = {"epochs": 2, "save_every_n_steps": 1, "checkpointer__keep_last_n_checkpoints": 9}
    whole = run(kind, folder, **settings)
    assert len(whole.losses) == 4
    output_dir = folder / "resumed"
    shutil.copytree(whole.output_dir / "step_2", output_dir / "step_2")
    (output_dir / "logs").mkdir()
    again = run(kind, folder, **settings, output_dir=output_dir, resume_from_checkpoint=True)
    assert again.losses == {step: whole.losses[step] for step in (3, 4)}
    assert all(torch.equal(value, again.trained[name]) for name, value in whole.trained.items())
    # Every trained parameter has moved: embeddings of tiles where there were images.
    before = run(kind, folder, max_steps_per_epoch=1, train=False).trained
    still = [name for name, value in whole.trained.items() if torch.equal(value, before[name])]
    assert still == []

    tokens, given = torch.tensor([[1, tiny_vision.IMAGE_TOKEN, 5, 9, 7]]), images([(2, 1)])
    mask = sees(tokens, given["aspect_ratio"])
    exported = MllamaForConditionalGeneration.from_pretrained(output_dir / "step_4").eval()
    model = again.recipe.model.eval()
    with torch.no_grad():
        wanted = logits_of_transformers(exported, tokens, given, mask)
        found = model(tokens, encoder_input=given, encoder_mask=mask)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-3)


def test_answers_are_learned_from_the_pixels_of_files(folder: Path) -> None:
    """Questions are all the same, so that text alone leaves ln 3 to each answer of three colours."""
    settings = {**tiny_vision.write_pictures(folder, times=14), "batch_size": 6, "epochs": 1, "shuffle": True}
    done = run("full", folder, **settings, optimizer={"_component_": "torch.optim.AdamW", "lr": 5e-3})
    row = done.recipe.loader.dataset[0]
    labels = sum(label != -100 for label in row["labels"])
    assert list(done.losses.values())[-1] * labels < math.log(3) / 2


def test_frozen_parts_stay_as_they_were(folder: Path) -> None:
    model = {"_component_": "tests.tiny_vision.with_parts", "checkpoint_dir": str(folder / "checkpoint")}
    settings = {"enable_activation_checkpointing": True, "epochs": 1}
    parts = {"decoder_trainable": False, "encoder_trainable": False}
    done = run("full", folder, model={**model, **parts}, **settings)
    before, after = (load_file(at / "model.safetensors") for at in (folder / "checkpoint", done.output_dir / "epoch_0"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    starts = ("language_model.model.layers.1.", "language_model.model.layers.4.")  # of cross-attention
    starts += ("vision_model.global_transformer.", "multi_modal_projector.", "language_model.model.embed_tokens.")
    assert changed == {name for name in before if name.startswith(starts)}
    rows = before["language_model.model.embed_tokens.weight"] != after["language_model.model.embed_tokens.weight"]
    assert rows.any(-1).nonzero().min() == tiny_vision.IMAGE_TOKEN  # before it are those of the decoder


def test_two_processes_train_as_one(forker: Forker, folder: Path) -> None:
    """In the first step one rank has text alone, and the other an image."""
    settings = {**SETTINGS, "shuffle": False, "clip_grad_norm": 1.0}
    alone = run("full", folder, **settings, batch_size=2).losses
    config = write_config("full_finetune_distributed", folder, folder / "output", **settings, batch_size=1)
    codes, said = fork(forker, config, "enable_activation_checkpointing=True")
    assert codes == [0, 0], said[-4000:]
    close(losses(folder / "output"), alone, {1, 2, 3})
