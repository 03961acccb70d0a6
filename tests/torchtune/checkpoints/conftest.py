"""What the tests of checkpoints share."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from tests.torchtune.checkpoints.small import load, write_folder

DISK = 4 * 2**20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(path)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"mounting a small file system is not permitted here: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small model."""
    return write_folder(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def model(source: Path) -> nn.Module:
    """The model of that folder."""
    return load(source)
