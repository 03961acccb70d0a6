"""Whole configs: those that are shipped are accepted, damaged ones are read or refused."""

import functools
import importlib.util
import random
from pathlib import Path

import pytest

from tests.torchtune.config.assets import typed_recipe
from torchtune import config
from torchtune.config import ConfigError

ASSETS = Path(__file__).parent / "assets"
SEED = 20

FIXTURES = [(ASSETS / "typed.yaml", typed_recipe), (ASSETS / "torch_parts.yaml", typed_recipe)]


def _shipped() -> list[tuple[Path, str]]:
    from torchtune._recipe_registry import get_all_recipes

    pairs = []
    for recipe in get_all_recipes():
        pairs += [(config.path, str(recipe.path)) for config in recipe.configs]
    return pairs


@functools.cache
def _load(path: str) -> object:
    spec = importlib.util.spec_from_file_location(f"_mutated_{Path(path).stem}", path)
    module = importlib.util.module_from_spec(spec)
    importlib.sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("path", "recipe"), _shipped(), ids=lambda value: Path(value).stem)
def test_an_untouched_shipped_config_is_accepted(path, recipe):
    config.load_and_check(path, [], _load(recipe).recipe_main)


OVERRIDES = (
    "a.b=c", "dataset.0=3", "model=x.y", "~dataset.0", "optimizer.betas.1=${x}", "=", "~", "a=", "..=1",
    "dataset.9.x=1", "prompt.user=[",
    "model._component_=", "output_dir=${output_dir}", "--x", "dataset_val.0.x=1", "x={a: b}",
)  # fmt: skip


def _damage(text: str, rng: random.Random) -> str:
    """Insert a letter, leave some out, or swap two lines, a few times: the text need not be YAML any more."""
    for _ in range(rng.randrange(1, 4)):
        position = rng.randrange(len(text))
        letter = rng.choice("{}[]:,&*!|>'\"%@`#-?\n \t${}.~=01aé\\_")
        lines = text.split("\n")
        first = rng.randrange(len(lines))
        second = rng.randrange(len(lines))
        lines[first], lines[second] = lines[second], lines[first]
        before = text[:position]
        text = rng.choice(
            (before + letter + text[position:], before + text[position + rng.randrange(1, 8) :], "\n".join(lines))
        )
    return text


def test_damaged_files_are_refused_or_read_but_never_crash(tmp_path):
    rng = random.Random(SEED)
    for _ in range(200):
        source, recipe = rng.choice(FIXTURES)
        path = tmp_path / "damaged.yaml"
        path.write_text(_damage(source.read_text(), rng), encoding="utf-8")
        mistakes = []
        try:
            config.load_and_check(path, rng.sample(OVERRIDES, rng.randrange(2)), recipe.recipe_main)
        except ConfigError as error:
            mistakes = [str(mistake) for mistake in error.errors]
        assert all(mistake and "\n" not in mistake for mistake in mistakes), mistakes
