"""The closed form says within a tenth what a simulation needs, and the search finds settings that fit."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.recipes.runs import load_recipe, write_config
from tests.torchtune.training.simulate.measured import FULL, FULL_MANY, LLAMA
from torchtune.config import load_and_check
from torchtune.training._settings_view import SettingsView
from torchtune.training.plan._plan import build_on_meta, memory_by_processes
from torchtune.training.simulate._depths import extrapolate, peak_of_all, two_depths
from torchtune.training.simulate._report import peak_bytes
from torchtune.training.simulate._simulate import Simulation, simulate

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
        ((FULL, {"batch_size": 1, "enable_activation_checkpointing": True}), 1),
        ((FULL_MANY, {"batch_size": 2, "enable_activation_checkpointing": True}), 8),
    ],
    indirect=["loaded"],
)
def test_the_closed_form_and_the_line_through_two_depths_are_near_a_simulation(loaded: Any, processes: int) -> None:
    main, load = loaded
    whole = simulate(main, load(), processes)
    wanted = peak_bytes(whole)
    if processes == 1:
        assert memory_by_processes(load(), [processes])[processes].total == pytest.approx(wanted, rel=0.12)
    depths = two_depths(build_on_meta(SettingsView.of(load()))[0])
    assert depths == (3, 4)
    two = [simulate(main, load(), processes, layers=layers) for layers in depths]
    assert peak_of_all(two, depths) == pytest.approx(wanted, rel=0.005)
    assert extrapolate(two, depths, flops) == flops(whole)


def flops(simulation: Simulation) -> int:
    """Of all steps."""
    return sum(sum(work.flops.values()) for work in simulation.observer.work.values())


@pytest.mark.parametrize("loaded", [(FULL, {"batch_size": 1})], indirect=True)
def test_two_micro_batches_stand_for_many(loaded: Any) -> None:
    main, load = loaded
    settings = load(["gradient_accumulation_steps=4", "tokenizer.max_seq_len=64"])
    whole, two = (simulate(main, settings, layers=2, micro_batches=most) for most in (None, 2))
    assert peak_bytes(two) == pytest.approx(peak_bytes(whole), rel=1e-4)  # the losses of the others
    assert flops(two) == flops(whole)


def test_depths_repeat_the_pattern_of_layers() -> None:
    def model(kinds: str) -> nn.Module:
        layers = nn.ModuleList(nn.Linear(1, 1) if kind == "a" else nn.Linear(2, 2) for kind in kinds)
        found = nn.Module()
        found.layers = layers
        return found

    assert two_depths(model("a" * 32)) == (3, 4)
    assert two_depths(model("b" + "a" * 9)) == (3, 4)
    assert two_depths(model("bbbb" + "a" * 9)) == (4, 5)
    assert two_depths(model("aaab" * 8)) == (4, 8)
    assert two_depths(model("aaab" * 8 + "aa")) == (6, 10)
    assert two_depths(model("abba")) is None
