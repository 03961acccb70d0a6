"""What the tests of checkpoints share."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

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
