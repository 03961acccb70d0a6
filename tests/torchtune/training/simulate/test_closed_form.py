"""The closed form says within a tenth what a simulation needs, and the search finds settings that fit."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.runs import load_recipe, write_config
from tests.torchtune.training.simulate.measured import FULL, FULL_MANY, LLAMA
from torchtune.config import load_and_check
from torchtune.training.plan._plan import memory_by_processes
from torchtune.training.simulate._report import peak_bytes
from torchtune.training.simulate._simulate import simulate

# Tensors without values may be as large as real ones.
WIDE = {"vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 8}
BF16 = {"dtype": "bf16", "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-5}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("closed_form")
    (folder / "checkpoint").mkdir()
    described = LLAMA | WIDE | {"tie_word_embeddings": False, "num_attention_heads": 8}
    (folder / "checkpoint" / "config.json").write_text(json.dumps(described))
    return folder


@pytest.fixture
def loaded(request: pytest.FixtureRequest, folder: Path) -> Any:
    """(recipe_main, what loads its settings with overrides)."""
    recipe, changes = request.param
    main = load_recipe(recipe, folder).recipe_main
    config = write_config(recipe, folder, folder / "never", **BF16, **changes)
    return main, lambda more=(): load_and_check(config, ["tokenizer.max_seq_len=2048", *more], main)


@pytest.mark.parametrize(
    ("loaded", "processes"),
    [
        ((FULL, {"batch_size": 2}), 1),
        ((FULL, {"batch_size": 1, "gradient_accumulation_steps": 2, "enable_activation_checkpointing": True}), 1),
        ((FULL_MANY, {"batch_size": 2}), 8),
        ((FULL_MANY, {"batch_size": 2, "enable_activation_checkpointing": True}), 8),
    ],
    indirect=["loaded"],
)
def test_the_closed_form_is_near_a_simulation(loaded: Any, processes: int) -> None:
    main, load = loaded
    wanted = peak_bytes(simulate(main, load(), processes))
    assert memory_by_processes(load(), [processes])[processes].total == pytest.approx(wanted, rel=0.1)
