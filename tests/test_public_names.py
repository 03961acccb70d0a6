"""What users import and what their configs name exists, or is absent for a reason that is written down."""

import importlib
import inspect
from pathlib import Path

import pytest
import yaml

from torchtune.config import locate
from torchtune.config._components import accepts

FACE = yaml.load((Path(__file__).parent / "public_names.yaml").read_text(), yaml.CSafeLoader)


def absent(package):
    groups = FACE["absent"].get(package, {})
    assert groups.keys() <= FACE["reasons"].keys()
    return set(" ".join(groups.values()).split())


def resolves(module, name):
    try:
        return hasattr(importlib.import_module(module), name)
    except ImportError:
        return False


@pytest.mark.parametrize("package", FACE["names"])
def test_a_public_name_is_here_or_its_absence_has_a_reason(package):
    missing = {name for name in FACE["names"][package].split() if not resolves(package, name)}
    assert missing == absent(package)


def test_every_absence_is_one_of_a_public_name():
    for package in FACE["absent"]:
        assert absent(package) <= set(FACE["names"][package].split())


@pytest.mark.parametrize("module", FACE["older_recipes"])
def test_imports_of_older_recipes_resolve_or_their_absence_has_a_reason(module):
    groups = FACE["older_absent"].get(module, {})
    assert groups.keys() <= FACE["reasons"].keys()
    missing = {name for name in FACE["older_recipes"][module].split() if not resolves(module, name)}
    assert missing == set(" ".join(groups.values()).split())


@pytest.mark.parametrize("module", FACE["files"])
def test_public_names_are_imported_from_the_files_that_defined_them(module):
    assert [name for name in FACE["files"][module].split() if not resolves(module, name)] == []


@pytest.mark.parametrize("module", ["torchtune.dev.rl.workers", "torchtune.modules.early_exit_loss"])
def test_an_experiment_that_this_library_lacks_is_named_by_its_import_error(module):
    with pytest.raises(ImportError, match=r"torchtune\.(dev|modules\.early_exit_loss).* is not part of this library"):
        importlib.import_module(module)


@pytest.mark.parametrize("path", FACE["components"])
def test_a_component_takes_the_arguments_that_configs_give(path):
    component = locate(path)
    accepted = accepts(component)
    unknown = [name for name in (FACE["components"][path] or "").split() if name not in accepted.named]
    assert accepted.takes_any_name or not unknown, f"{path}{inspect.signature(component)} does not take {unknown}"


def test_older_names_are_the_present_objects():
    gemma, gemma2 = (importlib.import_module(f"torchtune.models.{name}") for name in ("gemma", "gemma2"))
    assert gemma2.gemma_tokenizer is gemma.gemma_tokenizer
    attention = importlib.import_module("torchtune.modules.attention_utils")
    assert attention.flex_attention_compiled is attention.compile_flex_attention()
    with pytest.raises(AttributeError, match="has no attribute 'flex'"):
        _ = attention.flex


@pytest.mark.parametrize("package", ["data", "datasets", "generation", "models", "modules", "training", "utils"])
def test_a_face_exports_what_it_says(package):
    module = importlib.import_module(f"torchtune.{package}")
    assert len(set(module.__all__)) == len(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)
