"""The documentation builds without a warning, and names everything that is public."""

import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_is_complete(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", str(DOCS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-8000:]
    reference = "".join(page.read_text() for page in sorted((tmp_path / "api").glob("*.html")))
    missing = [name for name in public_names() if f'id="{name}"' not in reference]
    assert not missing, "names that are exported and not in docs/api"
    models = (tmp_path / "models.html").read_text()
    missing = [name for name in sizes() if f'#{name}"' not in models]
    assert not missing, "builders that are not in the table of models"
    assert "134,515,008" in models  # the parameters of SmolLM2 135M, as its checkpoint has them
    assert "there is no adapter" in (tmp_path / "recipes.html").read_text()  # a reason of recipes/features.yaml


def public_names() -> list[str]:
    """Dotted path of everything that the packages export, subpackages aside."""
    found = []
    for face in importlib.import_module("torchtune").__all__:
        module = importlib.import_module(f"torchtune.{face}")
        names = [name for name in module.__all__ if not inspect.ismodule(getattr(module, name))]
        found += [f"torchtune.{face}.{name}" for name in names]
    return found


def sizes() -> list[str]:
    """Dotted path of every builder that is a row of a family's table; those with adapters are called alike."""
    found = []
    for path in sorted((ROOT / "torchtune" / "models").glob("*/_model_builders.py")):
        family = f"torchtune.models.{path.parent.name}"
        rows = importlib.import_module(f"{family}._model_builders").BUILDERS
        public = importlib.import_module(family).__all__
        found += [f"{family}.{name}" for name in rows if name in public and "lora_" not in name]
    return found
