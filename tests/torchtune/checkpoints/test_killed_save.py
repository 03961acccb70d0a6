"""Killed with SIGKILL at any moment of a save: the newest complete checkpoint is found, and is whole."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.torchtune.checkpoints.small import write_folder

ROOT = Path(__file__).parents[3]


KILLS = {1: 6, 2: 8}  # by the number of ranks


@pytest.mark.slow
def test_killed_at_any_moment(tmp_path: Path) -> None:
    """Two ranks save now and then behind training's back; one is killed before the other, or both."""
    folder = write_folder(tmp_path / "source", num_hidden_layers=1)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.torchtune.checkpoints.killed_saver",
            str(folder),
            str(tmp_path),
            json.dumps(KILLS),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    for size, kills in KILLS.items():
        lives = [life[1:] for life in found if life[0] == size]
        steps = [step for step, _ in lives]
        assert len(steps) >= kills
        assert steps == sorted(steps), "what was complete once was lost later"
        assert sum(hit for _, hit in lives) >= kills // 4, "too few kills fell into a save"
