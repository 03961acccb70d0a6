"""Recipes train with any loss that keeps the contract, and refuse others before training."""

import pytest
import torch

from tests.devices import DEVICE
from tests.recipes.runs import TRAINING, start, write_config
from torchtune.generation import generate_tokens

# Without Adam, which makes a step of the full rate out of the rounding of a gradient near zero.
SGD = {"optimizer": {"_component_": "torch.optim.SGD", "lr": 0.5}}
TWO_STEPS = {"max_steps_per_epoch": 2, "batch_size": 4, "gradient_accumulation_steps": 2}


@pytest.mark.parametrize("name", TRAINING)
def test_a_plain_module_trains_as_ours_does(name, tmp_path):
    ours = start(name, tmp_path, **TWO_STEPS, **SGD)
    plain = start(name, tmp_path, **TWO_STEPS, **SGD, loss={"_component_": "torch.nn.CrossEntropyLoss"})
    assert plain.losses == pytest.approx(ours.losses, rel=1e-6)
    for parameter, value in ours.trained.items():
        torch.testing.assert_close(plain.trained[parameter], value, rtol=0, atol=1e-5)


def test_a_model_in_training_generates_what_it_says(tmp_path):
    """Nothing that training leaves on the model reaches sampling."""
    model = start("full_finetune_single_device", tmp_path, **TWO_STEPS).recipe.model
    assert model.training
    (tokens,) = generate_tokens(model, [[5, 6, 7]], max_new_tokens=1, temperature=0.0).tokens
    assert tokens[0] == model(torch.tensor([[5, 6, 7]], device=DEVICE))[0, -1].argmax()


def test_a_loss_that_cannot_be_used_is_one_sentence_before_training(tmp_path, tune):
    name, loss = "full_finetune_single_device", {"_component_": "torchtune.modules.loss.ForwardKLLoss"}
    result = tune("run", name, "--config", write_config(name, tmp_path, tmp_path / "output", loss=loss))
    assert result.code == 2
    assert "loss: ForwardKLLoss cannot be called with logits [n, v] and labels [n]" in result.err.splitlines()[-1]
