"""Recipes of all weights with a part of them frozen."""

import pytest
import torch
from safetensors.torch import load_file

from tests.recipes.runs import resume, start
from torchtune.checkpoints import complete_directories

FREEZE = {"model_converters": [{"_component_": "torchtune.modules.Freeze", "train": ["layers.1", "norm"]}]}
FULL = "full_finetune_single_device"


def weights(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


def test_frozen_weights_are_saved_unchanged_and_runs_resume(tmp_path):
    settings = {**FREEZE, "save_every_n_steps": 4, "clip_grad_norm": 1.0}
    run = start(FULL, tmp_path, **settings)
    before, after = (weights(path) for path in (tmp_path / "checkpoint", complete_directories(run.output_dir)[-1]))
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed == {name for name in after if name.startswith(("model.layers.1.", "model.norm."))}
    trained = {name for name, parameter in run.recipe.model.named_parameters() if parameter.requires_grad}
    assert len(run.recipe.optimizer.state) == len(trained) == len(changed)
    resume(FULL, tmp_path, run, 4, **settings)


@pytest.mark.parametrize("in_backward", [False, True], ids=["step", "in backward"])
def test_two_processes_train_a_part_of_the_weights_as_one(in_backward, forker, tmp_path):
    """FSDP shards frozen and trained weights of one module."""
    freeze = {"_component_": "torchtune.modules.Freeze", "freeze": ["tok_embeddings", "layers.0", "attn.k_proj"]}
    settings = {"model_converters": [freeze], "max_steps_per_epoch": 3}
    settings |= {"optimizer_in_bwd": True, "clip_grad_norm": None} if in_backward else {"clip_grad_norm": 1.0}
    alone = start(FULL, tmp_path, **settings, batch_size=4)
    run = forker.run_on_two("full_finetune_distributed", tmp_path, **settings, batch_size=2)
    assert run.losses == pytest.approx(alone.losses, rel=1e-5)
    saved, expected = (weights(complete_directories(compared.output_dir)[-1]) for compared in (run, alone))
    torch.testing.assert_close(saved, expected, atol=1e-5, rtol=1e-4)


def test_two_processes_train_modules_beside_an_adapter_as_one(forker, tmp_path):
    lora = {"_component_": "torchtune.modules.peft.LoRA", "rank": 2, "rank_pattern": {"layers.1.*q_proj": 4}}
    lora["train_modules"] = ["tok_embeddings", "norm"]
    settings = {"model_converters": [lora], "max_steps_per_epoch": 3, "clip_grad_norm": 1.0}
    alone = start("lora_finetune_single_device", tmp_path, **settings, batch_size=4)
    run = forker.run_on_two("lora_finetune_distributed", tmp_path, **settings, batch_size=2)
    assert run.losses == pytest.approx(alone.losses, rel=1e-5)
    saved, expected = (
        load_file(complete_directories(compared_run.output_dir)[-1] / "adapter" / "adapter_model.safetensors")
        for compared_run in (run, alone)
    )
    assert any("embed_tokens" in name for name in saved)
    torch.testing.assert_close(saved, expected, atol=1e-5, rtol=1e-4)


def test_noise_on_embeddings_goes_on_after_a_resume(tmp_path):
    noise = {"_component_": "torchtune.modules.NEFTune", "alpha": 5}
    settings = {"model_converters": [noise], "save_every_n_steps": 4}
    run = start(FULL, tmp_path, **settings)
    without = start(FULL, tmp_path, max_steps_per_epoch=1)
    assert run.losses[1] != without.losses[1]
    resume(FULL, tmp_path, run, 4, **settings)
