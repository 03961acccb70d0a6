"""Killed with SIGKILL at any moment of a save: the newest complete checkpoint is found, and is whole."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.torchtune.training.checkpointing.small import write_folder

ROOT = Path(__file__).parents[4]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "kills"), [(1, 8), (2, 12)], ids=["one process", "two ranks"])
def test_killed_at_any_moment(tmp_path: Path, size: int, kills: int) -> None:
    """Two ranks save now and then behind training's back; one is killed before the other, or both."""
    folder, output = write_folder(tmp_path / "source"), tmp_path / "output"
    output.mkdir()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.torchtune.training.checkpointing.killed_saver",
            str(folder),
            str(output),
            str(kills),
            str(size),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    steps = [step for step, _ in found]
    assert len(steps) >= kills
    assert steps == sorted(steps), "what was complete once was lost later"
    assert sum(hit for _, hit in found) >= kills // 4, "too few kills fell into a save"
