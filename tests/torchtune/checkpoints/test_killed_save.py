"""Killed with SIGKILL at any moment of a save: the newest complete checkpoint is found, and is whole."""

import json
from pathlib import Path

import pytest

from tests.recipes.killing import launch
from tests.torchtune.checkpoints.killed_saver import KILLS
from tests.torchtune.checkpoints.small import write_folder


@pytest.mark.slow
def test_killed_at_any_moment(tmp_path: Path) -> None:
    """Two ranks save now and then behind training's back; one is killed before the other, or both."""
    write_folder(tmp_path / "source", num_hidden_layers=1)
    launch("checkpoints.killed_saver", 1, tmp_path)
    for size, kills in KILLS.items():
        lives = json.loads((tmp_path / f"lives_{size}.json").read_text())
        steps = [step for step, _ in lives]
        assert len(steps) >= kills
        assert steps == sorted(steps), "what was complete once was lost later"
        assert sum(hit for _, hit in lives) >= kills // 4, "too few kills fell into a save"
