"""The names on the pages for users of other libraries exist, here and in TRL."""

import dataclasses
import inspect
import re

import pytest

from tests.docs.pages import ROOT
from torchtune._recipe_registry import get_all_recipes, resolve_recipe

_ROW = re.compile(r"^   \* - (.*)\n     - ((?:.*\n)(?:       .*\n)*)", re.MULTILINE)
_NAME = re.compile(r"``([a-z][\w.]*)(?:: [^`]*)?``")


def rows(page):
    """Names in both columns of the tables of a page."""
    matches = _ROW.findall((ROOT / "docs" / page).read_text())
    return [(_NAME.findall(left), _NAME.findall(right)) for left, right in matches]


def settings():
    """Names of the settings of all recipes."""
    mains = [resolve_recipe(recipe.name).load_main() for recipe in get_all_recipes()]
    types = [inspect.get_annotations(main, eval_str=True)["cfg"] for main in mains]
    return field_names(types)


def field_names(classes):
    names = set()
    for settings_class in classes:
        names.update(item.name for item in dataclasses.fields(settings_class))
    return names


@pytest.mark.parametrize("page", ["moving_trl.rst", "moving_axolotl.rst"])
def test_settings_named_on_the_page_exist(page):
    setting_names = settings()
    named = []
    for _, right in rows(page):
        named += [name for name in right if not name.startswith("torch")]
    assert len(named) > 30
    known_names = setting_names | {"dpo", "grpo", "lora", "qlora"}
    assert not [name for name in named if name.partition(".")[0] not in known_names]


def test_trl_names_on_the_page_exist():
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig
    from trl import DPOConfig, GRPOConfig, GRPOTrainer, SFTConfig

    trl_names = field_names((SFTConfig, DPOConfig, GRPOConfig, LoraConfig))
    trl_names |= {*inspect.signature(GRPOTrainer).parameters, *inspect.signature(BitsAndBytesConfig).parameters}
    named = []
    for left, _ in rows("moving_trl.rst"):
        named += left
    assert len(named) > 30
    assert not [name for name in named if name not in trl_names]
