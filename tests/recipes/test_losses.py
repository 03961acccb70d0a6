"""Recipes train with any loss that keeps the contract, and refuse others before training."""

import pytest
import torch

from tests.devices import DEVICE
from tests.recipes.runs import TRAINING, resume, start, write_config
from torchtune.generation import generate_tokens

# Without Adam, which makes a step of the full rate out of the rounding of a gradient near zero.
SGD = {"optimizer": {"_component_": "torch.optim.SGD", "lr": 0.5}}
TWO_STEPS = {"max_steps_per_epoch": 2, "batch_size": 4, "gradient_accumulation_steps": 2}


CROSS_ENTROPY = "torchtune.modules.loss.LinearCrossEntropyLoss"
MIXTURE = {
    "_component_": "torchtune.rlhf.loss.MixedPreferenceLoss",
    "losses": [
        {"_component_": "torchtune.rlhf.loss.DPOLoss", "rpo_alpha": 0.5},
        {"_component_": "torchtune.rlhf.loss.BCOPairLoss"},
        {"_component_": "torchtune.rlhf.loss.APOZeroLoss"},
        {"_component_": "torchtune.rlhf.loss.APODownLoss"},
        {"_component_": "torchtune.rlhf.loss.ChosenNLLLoss"},
    ],
    "loss_weights": [0.8, 0.2, 0.5, 0.5, 1.0],
}
# Terms of the cross entropy, which exclude each other in part, and all losses of pairs as one.
KINDS = {
    "smoothed": ("full_finetune", {"_component_": CROSS_ENTROPY, "label_smoothing": 0.1, "z_loss": 1e-3}),
    "reweighted": ("full_finetune", {"_component_": CROSS_ENTROPY, "reweighting": "eaft"}),
    "dft": ("full_finetune", {"_component_": CROSS_ENTROPY, "reweighting": "dft"}),
    "pairs": ("full_dpo", MIXTURE),
}


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_compute_a_loss_as_one_and_a_resumed_run_goes_on_with_it(kind, forker, tmp_path):
    method, loss = KINDS[kind]
    settings = {"loss": loss, "max_steps_per_epoch": 3, "epochs": 1, "clip_grad_norm": 1.0, "shuffle": False}
    alone = start(f"{method}_single_device", tmp_path, **settings, batch_size=4, save_every_n_steps=2)
    resume(f"{method}_single_device", tmp_path, alone, 2, **settings, batch_size=4)
    run = forker.run_on_two(f"{method}_distributed", tmp_path, **settings, batch_size=2)
    assert len(run.losses) == 3
    assert run.losses == pytest.approx(alone.losses, rel=1e-5)
    assert run.figure("grad_norm") == pytest.approx(alone.figure("grad_norm"), rel=1e-4)


@pytest.mark.parametrize("name", TRAINING)
def test_a_plain_module_trains_as_ours_does(name, tmp_path):
    run_here = start(name, tmp_path, **TWO_STEPS, **SGD)
    plain = start(name, tmp_path, **TWO_STEPS, **SGD, loss={"_component_": "torch.nn.CrossEntropyLoss"})
    assert plain.losses == pytest.approx(run_here.losses, rel=1e-6)
    for parameter, value in run_here.trained.items():
        torch.testing.assert_close(plain.trained[parameter], value, rtol=0, atol=1e-5)


def test_a_model_in_training_generates_what_it_says(tmp_path):
    """Nothing that training leaves on the model reaches sampling."""
    model = start("full_finetune_single_device", tmp_path, **TWO_STEPS).recipe.model
    assert model.training
    (tokens,) = generate_tokens(model, [[5, 6, 7]], max_new_tokens=1, temperature=0.0).tokens
    assert tokens[0] == model(torch.tensor([[5, 6, 7]], device=DEVICE))[0, -1].argmax()


def test_a_loss_that_cannot_be_used_is_one_sentence_before_training(tmp_path, tune):
    name = "full_finetune_single_device"
    loss = {"_component_": "torchtune.modules.loss.ForwardKLLoss"}
    result = tune("run", name, "--config", write_config(name, tmp_path, tmp_path / "output", loss=loss))
    assert result.code == 2
    assert "loss: ForwardKLLoss cannot be called with logits [n, v] and labels [n]" in result.err.splitlines()[-1]
