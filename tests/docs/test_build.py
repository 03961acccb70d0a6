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


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages as text."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", str(DOCS), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-8000:]
    return folder


@pytest.mark.slow
def test_every_public_name_is_in_the_reference(built: Path) -> None:
    faces = importlib.import_module("torchtune").__all__
    text = "".join(page.read_text() for page in sorted((built / "api").glob("*.html")))
    missing = []
    for face in faces:
        module = importlib.import_module(f"torchtune.{face}")
        for name in module.__all__:
            if not inspect.ismodule(getattr(module, name)) and f'id="torchtune.{face}.{name}"' not in text:
                missing.append(f"torchtune.{face}.{name}")
    assert not missing


@pytest.mark.slow
def test_the_tables_are_filled(built: Path) -> None:
    models = (built / "models.html").read_text()
    for path in sorted((ROOT / "torchtune" / "models").glob("*/_model_builders.py")):
        family = f"torchtune.models.{path.parent.name}"
        public = set(importlib.import_module(family).__all__)
        for name in public & set(importlib.import_module(f"{family}._model_builders").BUILDERS):
            if not name.startswith("qlora_"):
                assert f'#{family}.{name}"' in models, f"{family}.{name} is not in the table"
    assert "134,515,008" in models  # SmolLM2 135M, as its checkpoint has them
    assert "there is no adapter" in (built / "recipes.html").read_text()
