"""The recipe that answers a prompt."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.recipes.runs import class_of, load_recipe
from tests.tiny import write_checkpoint
from torchtune.config import ConfigError, load_and_check


def answer(folder: Path, **settings: Any) -> str:
    checkpoint = folder / "checkpoint"
    if not checkpoint.exists():
        write_checkpoint(checkpoint)
    cfg = {
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": str(checkpoint),
        },
        "prompt": {"user": "the cat sees"},
        "max_new_tokens": 12,
        "seed": 0,
        "device": "cpu",
        "dtype": "fp32",
        "log_level": "ERROR",
        **settings,
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(cfg))
    module = load_recipe("generate", folder)
    cfg = load_and_check(path, [], module.recipe_main)
    recipe = class_of(module)(cfg)
    recipe.setup(cfg)
    text = recipe.generate(cfg)
    assert recipe.model.training  # as it was built
    return text


def test_model_and_tokenizer_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    said = {
        "model": {
            "_component_": "torchtune.models.from_hf_config",
            "checkpoint_dir": str(tmp_path / "checkpoint"),
        },
        "tokenizer": {
            "_component_": "torchtune.modules.transforms.tokenizers.hf_tokenizer",
            "path": str(tmp_path / "checkpoint"),
        },
    }
    found = answer(tmp_path)
    assert found
    assert found == answer(tmp_path, **said)
    assert found == answer(tmp_path, top_k=0)
    assert found != answer(tmp_path, top_k=1)


def test_a_checkpointer_without_a_folder_needs_both(tmp_path: Path) -> None:
    other = {"_component_": "torchtune.training.FullModelHFCheckpointer"}
    with pytest.raises(ConfigError) as found:
        answer(tmp_path, checkpointer=other)
    for name in ("model", "tokenizer"):
        assert f"{name}: is not given, and checkpointer has no checkpoint_dir" in str(found.value)
