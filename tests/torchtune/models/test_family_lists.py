"""A family is found by its module; the two tables that also need it name what is missing."""

import re
from pathlib import Path

import pytest
import yaml

import torchtune.models
from tests.torchtune.models.families import COUNTED, FAMILIES, PUBLISHED, STATED
from torchtune._lazy import modules_in
from torchtune.models import get_spec, list_specs, spec_for_architecture

ROOT = Path(__file__).parents[3]
# Modules without a text model of their own.
OTHERS = {"clip", "convert_weights", "llama3_2_vision"}
WITH_IMAGES = {name for name in list_specs() if get_spec(name).image_processor is not None}
TEXT_FAMILIES = sorted({*modules_in(torchtune.models.__path__)} - OTHERS - WITH_IMAGES)
TABLE = yaml.safe_load((ROOT / "recipes/templates/models.yaml").read_text())


def missing_entries(family: str, reader: str, sizes: list[str]) -> list[str]:
    """Return one line for every table that lacks an entry for a family.

    Args:
        family: name of the family's module.
        reader: family that reads the architecture of ``family``.
        sizes: names of the builders of ``family``.
    """
    missing = []
    if family not in FAMILIES and reader not in FAMILIES:
        missing.append(f"tests/torchtune/models/families.py: add a row '{family}' to FAMILIES")
    for size in sizes:
        if size not in {*PUBLISHED, *COUNTED, *STATED}:
            missing.append(f"tests/torchtune/models/families.py: add '{size}' to PUBLISHED")
    rows = [row for name, row in TABLE["models"].items() if name.partition("/")[0] == family]
    if sizes and not rows:
        missing.append(f"recipes/templates/models.yaml: add a row '{family}/SIZE' to models, then run make configs")
    has_titles = rows and all("title" in row for row in rows)
    if sizes and not has_titles and family not in TABLE["families"]:
        missing.append(f"recipes/templates/models.yaml: add a row '{family}' with a title to families")
    return missing


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_family_is_in_every_table(family):
    module = getattr(torchtune.models, family)
    reader = spec_for_architecture(module.SPEC.architectures[0]).name
    missing = missing_entries(family, reader, list(getattr(module, "SIZES", ())))
    assert not missing, "\n".join(["", *missing])


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_each_architecture_of_a_family_has_one_reader(family):
    spec = getattr(torchtune.models, family).SPEC
    assert spec is get_spec(spec.name), f"torchtune/models/{family}: SPEC.name is '{spec.name}', not '{family}'"
    for architecture in spec.architectures:
        families = [name for name in list_specs() if architecture in get_spec(name).architectures]
        reader = spec_for_architecture(architecture)
        assert architecture in reader.architectures
        assert len(families) == 1 or torchtune.models._spec._READERS.get(architecture) == reader.name, (
            f"torchtune/models/_spec.py: say in _READERS which of {', '.join(families)} reads '{architecture}'"
        )
        # The logits of the reader alone are compared with transformers.
        assert spec.weight_maps["hf"] is reader.weight_maps["hf"], (
            f"torchtune/models/{family}: take the weight map of {reader.name}, which reads '{architecture}'"
        )


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_builders_of_a_family_have_a_line_in_its_module(family):
    """Readers, editors and type checkers see no names that are made at run time."""
    module = getattr(torchtune.models, family)
    path = Path(module.__file__)
    if path.name == "__init__.py":
        source = path.with_suffix(".pyi").read_text()
    else:
        source = path.read_text()
    definitions = r"^(?:def |class |.*import .*|)%s\b"
    missing = [name for name in module.__all__ if not re.search(definitions % name, source, re.MULTILINE)]
    lines = [f'{name} = BUILDERS["{name}"]' for name in missing]
    assert not missing, "\n".join(["", f"torchtune/models/{family}.py: add these lines after BUILDERS:", *lines])


def test_tables_that_lack_a_new_family_are_named():
    missing = missing_entries("new_family", "new_family", ["new_family_1b"])
    assert [line.partition(":")[0] for line in missing] == [
        "tests/torchtune/models/families.py",
        "tests/torchtune/models/families.py",
        "recipes/templates/models.yaml",
        "recipes/templates/models.yaml",
    ]
