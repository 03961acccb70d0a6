"""A family is found by its folder; what else has to name it is listed here, with the file to edit."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import torchtune.models
from tests.torchtune.models.conftest import FAMILIES
from tests.torchtune.models.published import PUBLISHED, STATED
from tests.torchtune.models.test_left_out_fields import _FILES
from tests.torchtune.models.test_sizes import SIZES
from tests.torchtune.training.parallel.test_families import SPLIT, WITH_EXPERTS, WITH_MIXERS
from torchtune._lazy import modules_in
from torchtune.models import get_spec, list_specs, spec_for_architecture

ROOT = Path(__file__).parents[3]
# Without a text model of their own: parts of other families, and models with images.
PARTS = {"clip", "convert_weights", "llama3_2_vision", "qwen2_5_vl", "qwen3_5_vl", "qwen3_vl"}
PARTS |= {"gemma4_unified_vl", "gemma4_vl", "idefics3", "llama4_vl", "mistral3", "smolvlm"}
FOLDERS = sorted({*modules_in(torchtune.models.__path__)} - PARTS)


def missing_entries(family: str, reader: str, architecture: str, has_sizes: bool = True) -> Iterator[str]:
    """One line for every file that lacks an entry for ``family``; ``reader`` is the family of its architecture."""
    configs = yaml.safe_load((ROOT / "tools/configs/models.yaml").read_text())["models"]
    entries = {
        f"tests/torchtune/models/conftest.py: add a row '{family}' to FAMILIES": (
            family in FAMILIES or reader in FAMILIES
        ),
        "tests/torchtune/models/published.py: add its sizes to PUBLISHED": (
            not has_sizes
            or family == "llama3_3"  # which only renames sizes
            or any(owner == family and name in {*PUBLISHED, *STATED} for owner, name in SIZES)
        ),
        "tests/torchtune/models/test_left_out_fields.py: add a row of its architecture to _FILES": (
            architecture in {name for name, _ in _FILES.values()}
        ),
        "tests/torchtune/training/parallel/test_families.py: add its architecture to SPLIT or WITH_…": (
            architecture in {*SPLIT, *WITH_EXPERTS, *WITH_MIXERS}
        ),
        f"tools/configs/models.yaml: add a row '{family}/SIZE' to models, then run make configs": (
            not has_sizes or any(name.partition("/")[0] == family for name in configs)
        ),
    }
    yield from (entry for entry, there in entries.items() if not there)


@pytest.mark.parametrize("family", FOLDERS)
def test_a_family_is_listed_everywhere(family):
    assert getattr(torchtune.models, family).__name__ == f"torchtune.models.{family}"
    spec = getattr(torchtune.models, family).SPEC
    assert spec is get_spec(spec.name), f"torchtune/models/{family}: SPEC.name is '{spec.name}', not '{family}'"
    for architecture in spec.architectures:
        others = [name for name in list_specs() if architecture in get_spec(name).architectures]
        reader = spec_for_architecture(architecture)
        assert architecture in reader.architectures
        assert len(others) == 1 or torchtune.models._spec._READERS.get(architecture) == reader.name, (
            f"torchtune/models/_spec.py: say in _READERS which of {', '.join(others)} reads '{architecture}'"
        )
    written = spec.architectures[0]
    has_sizes = bool(getattr(getattr(torchtune.models, family), "SIZES", True))
    reader = spec_for_architecture(written).name
    missing = list(missing_entries(family, reader, written.removesuffix("ForCausalLM"), has_sizes))
    assert not missing, "\n".join(["", *missing])


def test_the_missing_entries_of_a_new_family_are_named():
    files = [line.partition(":")[0] for line in missing_entries("new_family", "new_family", "NewFamily")]
    assert files == [
        "tests/torchtune/models/conftest.py",
        "tests/torchtune/models/published.py",
        "tests/torchtune/models/test_left_out_fields.py",
        "tests/torchtune/training/parallel/test_families.py",
        "tools/configs/models.yaml",
    ]
