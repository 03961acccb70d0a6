"""Recipes and adapters: nothing that is trained may be missing from what is saved."""

from pathlib import Path

import pytest

from tests.recipes.runs import start
from torchtune.training.checkpointing import CheckpointError


def test_a_full_recipe_refuses_adapters_before_it_trains(tmp_path: Path) -> None:
    lora = [{"_component_": "torchtune.modules.peft.LoRA", "rank": 2, "alpha": 4}]
    with pytest.raises(CheckpointError, match=r"q_proj\.lora_a\.weight.*lora_finetune_single_device"):
        start("full_finetune_single_device", tmp_path, train=False, model_converters=lora)
