"""Settings written as YAML."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.recipes.runs import RECIPES, load_recipe
from tests.torchtune.config.assets import typed_recipe
from torchtune import config
from torchtune.config import describe_settings, load_and_check, log_config, save_config, settings_of

ASSETS = Path(__file__).parent / "assets"
Check = Callable[..., typed_recipe.Settings]


@pytest.mark.parametrize("name", ["typed.yaml", "torch_parts.yaml"])
def test_the_saved_config_gives_the_same_settings(name, tmp_path):
    settings = load_and_check(ASSETS / name, ["prompt.user=a: 1e5 # b"], typed_recipe.recipe_main)
    save_config(settings, tmp_path / "saved.yaml")
    again = load_and_check(tmp_path / "saved.yaml", [], typed_recipe.recipe_main)
    assert again == settings
    assert again.recipe == "typed_recipe"
    save_config(again, tmp_path / "twice.yaml")
    assert (tmp_path / "saved.yaml").read_text() == (tmp_path / "twice.yaml").read_text()


def test_the_saved_config_names_the_recipe_that_ran_where_the_config_named_none(tmp_path):
    main = load_recipe("quantize", tmp_path).recipe_main
    first, other_lines = (RECIPES / "configs" / "quantization.yaml").read_text().split("\n", 1)
    assert first == "recipe: quantize"
    (tmp_path / "old.yaml").write_text(other_lines)
    save_config(load_and_check(tmp_path / "old.yaml", [], main), tmp_path / "saved.yaml")
    assert (tmp_path / "saved.yaml").read_text().startswith("recipe: quantize\n")


@pytest.mark.parametrize(
    "text",
    [
        "1e5",
        "2e-5",
        "123",
        "null",
        "None",
        "true",
        "a: b",
        "x # y",
        "${y}",
        "a ${b} c",
        "\\${z}",
        "\\n",
        "two\nlines",
        "ü",
        "",
    ],
)
def test_any_text_is_read_back_as_it_was_saved(text, check, tmp_path):
    settings = check()
    settings.prompt = {"user": text}
    save_config(settings, tmp_path / "saved.yaml")
    assert load_and_check(tmp_path / "saved.yaml", [], typed_recipe.recipe_main).prompt == {"user": text}


def test_logged_config_hides_secrets(check, caplog):
    with caplog.at_level(logging.INFO, logger="torchtune"):
        log_config("typed_recipe", check("hub_token=hf_abc"))
    (message,) = [record.getMessage() for record in caplog.records]
    first, _, text = message.partition("\n\n")
    assert first == "Running typed_recipe with resolved config:"
    assert "hf_abc" not in text
    keys = list(yaml.safe_load(text))
    assert keys == sorted(keys)


def test_help_text_has_types_defaults_and_comments():
    lines = describe_settings(typed_recipe.Settings).splitlines()
    assert lines[0] == "Settings of the typed fixture."
    assert lines[2:4] == ["  output_dir: str (required)", "      Where everything is written, the resolved config too."]
    assert "  batch_size: int >= 1 (default: 2)" in lines
    assert "  dtype: one of bf16, fp32 (default: bf16)" in lines
    assert "  lr_scheduler: component or null (default: null)" in lines
    assert "  buckets: list of int (default: [])" in lines
    assert "  optimizer_in_bwd: bool (default: false)" in lines
    assert "declares no settings" in describe_settings(config.settings_of(lambda cfg: None))


def test_settings_of_returns_the_annotated_dataclass():
    assert settings_of(typed_recipe.recipe_main) is typed_recipe.Settings
