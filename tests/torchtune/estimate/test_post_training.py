"""Recipes of preferences and distillation are simulated as they are; what a model will sample nobody knows before."""

from pathlib import Path
from typing import Any

import pytest

from tests.recipes.runs import load_recipe, write_config
from torchtune.config import load_and_check
from torchtune.data import Batch, collate_preference
from torchtune.estimate import SimulationError
from torchtune.estimate._ledger import Peak, highest_by_phase
from torchtune.estimate._simulate import simulate
from torchtune.rlhf.loss import AnswerLoss
from torchtune.rlhf.loss._base import total_and_metrics

OWN = {"dataset": {"_component_": "torchtune.datasets.kto_dataset", "source": "json"}}
OWN |= {"loss": {"_component_": f"{__name__}.Regret"}, "collate_fn": f"{__name__}.answers_of"}
RETRIEVAL = {"dataset": {"_component_": "torchtune.datasets.embedding_dataset", "source": "json"}}
RETRIEVAL |= {"loss": {"_component_": "torchtune.rlhf.loss.InfoNCELoss"}}
RETRIEVAL |= {"collate_fn": "torchtune.data.collate_embedding"}

RERANKING = {"dataset": {"_component_": "torchtune.datasets.reranking_dataset", "source": "json", "listwise": True}}
RERANKING |= {"loss": {"_component_": "torchtune.rlhf.loss.RerankListwiseLoss"}}
RERANKING |= {"collate_fn": "torchtune.data.collate_reranking", "model__num_classes": 1}
RERANKING |= {"model___component_": "torchtune.modules.classifier_model"}
RERANKING |= {"model__base_model_path": "torchtune.models.from_hf_config"}


class Regret(AnswerLoss):
    """A user's loss of labeled answers."""

    trains_on = "answers"

    def sum_and_metrics(self, batch: Batch, scores: Any, reference: Any = None, baseline: Any = None) -> Any:
        return total_and_metrics(self, scores.where(batch.per_document["is_chosen"], -scores), scores == scores, {})


def answers_of(rows: list[Any]) -> Batch:
    """A user's collation."""
    answers = []
    for row in rows:
        answers.append({name: row[name] for name in ("tokens", "labels", "is_chosen")})
    return collate_preference(answers)


def simulated(name: str, folder: Path, **settings: Any) -> dict[str, Peak]:
    """Peak of every phase."""
    main = load_recipe(name, folder).recipe_main
    config = write_config(name, folder, folder / "never", tokenizer__max_seq_len=32, **settings)
    ledger = simulate(main, load_and_check(config, [], main)).ledger
    return highest_by_phase(ledger.peaks())


IMAGES = "torchtune.data.padded_collate_tiled_images_and_mask"


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("lora_dpo_single_device", {"reference_cache": "never"}),
        ("lora_dpo_single_device", OWN),
        ("knowledge_distillation_single_device", {}),
        ("lora_dpo_single_device", RETRIEVAL),
        ("lora_dpo_single_device", {**RETRIEVAL, "loss__texts_per_pass": 2}),
        ("lora_dpo_single_device", RERANKING),
    ],
    ids=["pairs", "own loss of labeled answers", "teacher", "queries with passages", "passages in parts", "candidates"],
)
def test_a_step_is_simulated(name, settings, tmp_path):
    peaks = simulated(name, tmp_path, **settings)
    assert peaks["backward"].total > peaks["set-up"].total > 0
    # Before the first forward pass there are no activations; later they are what is held for the backward pass.
    assert peaks["set-up"].components["activations"] == 0
    assert peaks["backward"].components["activations"] > 0


def test_sampling_is_refused(tmp_path):
    with pytest.raises(SimulationError, match="a recipe that samples answers cannot be simulated: use --dry-run"):
        simulated("full_grpo_single_device", tmp_path)
    with pytest.raises(SimulationError, match="a run with tiles of images cannot be simulated: use --dry-run"):
        simulated("full_finetune_single_device", tmp_path, collate_fn=IMAGES)


def test_a_collation_that_reads_more_of_a_row_is_refused(tmp_path):
    with pytest.raises(SimulationError, match="reads 'is_chosen', but rows of a simulated run only have tokens, "):
        simulated("full_finetune_single_device", tmp_path, collate_fn=f"{__name__}.answers_of")


@pytest.mark.parametrize("name", ["generation", "quantization"])
def test_recipe_that_does_not_train_is_refused(name, tune):
    done = tune("estimate", "--config", name, "--simulate", "1xH100")
    assert done.code == 2
    assert "only training can be simulated" in done.err
