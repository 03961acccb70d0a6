"""Random mistakes in whole configs: each must be refused, by name, with the right name suggested, at little cost."""

import ast
import functools
import importlib.util
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.torchtune.config.assets import typed_recipe
from tests.torchtune.config.mutator import Edit, Mutator
from tests.work import at_most
from torchtune import config
from torchtune.config import ConfigError, _unread

ROOT = Path(__file__).parents[3]
ASSETS = Path(__file__).parent / "assets"
EDITS = 150
SEED = 20

FIXTURES = [(ASSETS / "typed.yaml", typed_recipe), (ASSETS / "torch_parts.yaml", typed_recipe)]


def _shipped() -> list[tuple[Path, str]]:
    from torchtune._recipe_registry import get_all_recipes

    return [(each.path, str(recipe.path)) for recipe in get_all_recipes() for each in recipe.configs]


@pytest.fixture(scope="module", autouse=True)
def sources_read_once() -> Iterator[None]:
    """What a recipe's source reads is found out once, not for each of its configs."""
    known: dict[int, tuple[dict, object]] = {}

    def source(tree: ast.Module, names: dict) -> object:
        if id(names) not in known:
            known[id(names)] = (names, original(tree, names))
        return known[id(names)][1]

    original = _unread._Source
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_unread, "_Source", source)
        yield


@functools.cache
def _load(path: str) -> object:
    spec = importlib.util.spec_from_file_location(f"_mutated_{Path(path).stem}", path)
    module = importlib.util.module_from_spec(spec)
    importlib.sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _refusal(edit: Edit, recipe: object, folder: Path) -> ConfigError | None:
    path = folder / "edited.yaml"
    path.write_text(edit.text)
    try:
        config.load_and_check(path, edit.overrides, recipe.recipe_main)
    except ConfigError as error:
        return error
    return None


def _run(cases: list[tuple[Path, object]], edits: int, folder: Path) -> None:
    rng = random.Random(SEED)
    kinds = list(Mutator(cases[0][0].read_text(), cases[0][1].Settings, rng).kinds)
    tried: Counter[str] = Counter()
    suggested: Counter[bool] = Counter()
    misses = []
    for number in range(10 * edits):
        if sum(tried.values()) >= edits:
            break
        path, recipe = cases[number % len(cases)]
        edit = Mutator(path.read_text(), recipe.Settings, rng).edit(kinds[(number + number // len(cases)) % len(kinds)])
        if edit is None:
            continue
        with at_most(10**6):
            error = _refusal(edit, recipe, folder)
        what = f"{path.name}: {edit.kind}: {edit.key} {edit.overrides}"
        assert error is not None, f"{what} was accepted"
        named = [mistake for mistake in error.errors if mistake.key == edit.key]
        assert named, f"{what}: not named in {error}"
        assert all(mistake.place for mistake in named), f"{what}: no place in {error}"
        tried[edit.kind] += 1
        if edit.suggestion is not None:
            words = "".join(c if c.isalnum() or c == "_" else " " for c in named[0].reason.partition("did you mean")[2])
            right = edit.suggestion in words.split()
            suggested[right] += 1
            misses += [] if right else [f"{what}: {named[0].reason}"]
    assert sum(tried.values()) >= edits
    assert suggested[True] >= 0.95 * suggested.total(), "\n".join(misses)


@pytest.mark.parametrize("path", [path for path, _ in FIXTURES], ids=lambda path: path.name)
def test_an_untouched_fixture_is_accepted(path: Path) -> None:
    config.load_and_check(path, [], typed_recipe.recipe_main)


def test_random_edits_of_the_fixtures_are_refused(tmp_path: Path) -> None:
    for path, recipe in FIXTURES:  # what imports cost is no part of the time of a check
        config.load_and_check(path, [], recipe.recipe_main)
    _run(FIXTURES, EDITS, tmp_path)


def test_every_kind_of_edit_occurs_in_the_fixtures() -> None:
    rng = random.Random(SEED)
    for kind in Mutator(FIXTURES[0][0].read_text(), typed_recipe.Settings, rng).kinds:
        assert any(Mutator(path.read_text(), typed_recipe.Settings, rng).edit(kind) for path, _ in FIXTURES), kind


@pytest.mark.parametrize(("path", "recipe"), _shipped(), ids=lambda value: Path(value).stem)
def test_an_untouched_shipped_config_is_accepted(path: Path, recipe: str) -> None:
    config.load_and_check(path, [], _load(recipe).recipe_main)


@pytest.mark.skipif(not _shipped(), reason="no configs are shipped in recipes/configs")
def test_random_edits_of_the_shipped_configs_are_refused(tmp_path: Path) -> None:
    modules = {recipe: _load(recipe) for recipe in {recipe for _, recipe in _shipped()}}
    typed = [(path, modules[recipe]) for path, recipe in _shipped() if hasattr(modules[recipe], "Settings")]
    typed = random.Random(SEED).sample(typed, min(len(typed), 40))
    for path, module in typed:  # what imports cost is no part of the time of a check
        config.load_and_check(path, [], module.recipe_main)
    _run(typed, 2 * len(typed), tmp_path)


OVERRIDES = (
    "a.b=c", "dataset.0=3", "model=x.y", "~dataset.0", "optimizer.betas.1=${x}", "=", "~", "a=", "..=1",
    "dataset.9.x=1", "prompt.user=[",
    "model._component_=", "output_dir=${output_dir}", "--x", "dataset_val.0.x=1", "x={a: b}",
)  # fmt: skip


def _damage(text: str, rng: random.Random) -> str:
    """Letters put in, left out, lines swapped: what is left need not be YAML."""
    for _ in range(rng.randrange(1, 4)):
        at, letter = rng.randrange(len(text)), rng.choice("{}[]:,&*!|>'\"%@`#-?\n \t${}.~=01aé\\_")
        lines = text.split("\n")
        one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
        lines[one], lines[other] = lines[other], lines[one]
        text = rng.choice(
            (text[:at] + letter + text[at:], text[:at] + text[at + rng.randrange(1, 8) :], "\n".join(lines))
        )
    return text


def test_damaged_files_are_refused_or_read_but_never_crash(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    for _ in range(200):
        source, recipe = rng.choice(FIXTURES)
        path = tmp_path / "damaged.yaml"
        path.write_text(_damage(source.read_text(), rng), encoding="utf-8")
        mistakes: list[str] = []
        try:
            config.load_and_check(path, rng.sample(OVERRIDES, rng.randrange(2)), recipe.recipe_main)
        except ConfigError as error:
            mistakes = [str(mistake) for mistake in error.errors]
        assert all(mistake and "\n" not in mistake for mistake in mistakes), mistakes
