"""Recipes of preferences and distillation are simulated as they are; what a model will sample nobody knows before."""

from pathlib import Path
from typing import Any

import pytest

from tests.recipes.runs import load_recipe, write_config
from torchtune.config import load_and_check
from torchtune.training.simulate._simulate import SimulationError, simulate

KTO = {"dataset": {"_component_": "torchtune.datasets.kto_dataset", "source": "json"}}
KTO["loss"] = {"_component_": "torchtune.rlhf.loss.KTOLoss"}


def simulated(name: str, folder: Path, **settings: Any) -> dict[str, int]:
    """Peak of every phase, in bytes."""
    main = load_recipe(name, folder).recipe_main
    config = write_config(name, folder, folder / "never", tokenizer__max_seq_len=32, **settings)
    ledger = simulate(main, load_and_check(config, [], main)).observer.ledger
    return {phase: peak.total for phase, peak in ledger.peaks().items()}


IMAGES = "torchtune.data.padded_collate_tiled_images_and_mask"


@pytest.mark.parametrize(
    ("name", "settings"),
    [("lora_dpo_single_device", {}), ("lora_dpo_single_device", KTO), ("knowledge_distillation_single_device", {})],
    ids=["pairs", "labelled answers", "teacher"],
)
def test_two_steps_are_simulated(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    peaks = simulated(name, tmp_path, **settings)
    assert peaks["backward"] > peaks["set-up"] > 0


def test_sampling_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SimulationError, match="a recipe that samples answers cannot be simulated: use --dry-run"):
        simulated("full_grpo_single_device", tmp_path)
    with pytest.raises(SimulationError, match="a run with images cannot be simulated: use --dry-run"):
        simulated("full_finetune_single_device", tmp_path, collate_fn=IMAGES)
